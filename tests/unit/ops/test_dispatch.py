from types import SimpleNamespace

import pytest
import torch

from tandem.ops import dispatch
from tandem.ops.rotary import reference


def use_native(monkeypatch, module):
    monkeypatch.setattr(dispatch, "_native_module", lambda op, path: module)
    monkeypatch.delenv("TANDEM_NATIVE", raising=False)


def test_native_path_runs_what_it_supports(monkeypatch):
    native = SimpleNamespace(supports=lambda x: x.dtype == torch.float32)
    use_native(monkeypatch, native)

    assert dispatch.choose("norm", reference, torch.zeros(1)) is native
    assert dispatch.choose("norm", reference, torch.zeros(1, dtype=torch.float64)) is reference


def test_native_path_is_for_cpu_tensors_only(monkeypatch):
    use_native(monkeypatch, SimpleNamespace(supports=lambda x: True))

    assert dispatch.choose("norm", reference, torch.zeros(1, device="meta")) is reference


def test_environment_switches_native_code_off_at_once(monkeypatch):
    use_native(monkeypatch, SimpleNamespace(supports=lambda x: True))
    monkeypatch.setenv("TANDEM_NATIVE", "0")

    assert dispatch.choose("norm", reference, torch.zeros(1)) is reference


def test_op_without_native_code_runs_its_reference():
    assert dispatch.choose("rotary", reference, torch.zeros(1)) is reference


def test_broken_native_module_is_an_error(monkeypatch):
    """A module that exists but does not import is our bug; falling back would hide it for good."""

    def fail(name):
        raise ImportError("symbol missing")

    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(dispatch.importlib, "import_module", fail)
    dispatch._native_module.cache_clear()
    with pytest.raises(ImportError, match="symbol missing"):
        dispatch.choose("norm", reference, torch.zeros(1))
    dispatch._native_module.cache_clear()
