"""Compilation, its cache, and the portable code that CPUs without AVX-512 run."""

import subprocess
import sys

import pytest
import torch

from tandem.ops.linear import PackedLinear
from tandem.ops.native import NativeBuildError, build, build_library, library, load, open_library
from tandem.ops.norm import cpu as norm
from tandem.ops.ssd import cpu as ssd


@pytest.fixture
def tiny_source(tmp_path, monkeypatch):
    """A folder with one small source instead of the kernels, and an empty cache."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "_FOLDER", folder)
    return folder


@pytest.mark.usefixtures("native")
def test_second_build_finds_the_first(tiny_source, tmp_path, monkeypatch):
    first = build_library(tmp_path / "cache")
    monkeypatch.setattr(build, "_run_all", lambda commands: pytest.fail("compiled again"))
    assert build_library(tmp_path / "cache") == first
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]


@pytest.mark.usefixtures("native")
def test_changed_source_is_another_library(tiny_source, tmp_path):
    first = build_library(tmp_path / "cache")
    (tiny_source / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert build_library(tmp_path / "cache") != first


@pytest.mark.usefixtures("native")
def test_compiler_errors_are_told(tiny_source, tmp_path):
    (tiny_source / "one.cpp").write_text("this is not C++;\n")
    with pytest.raises(NativeBuildError, match=r"(?s)one\.cpp.*TANDEM_NATIVE=0"):
        build_library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_compiler_is_told(tiny_source, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeBuildError, match="no-such-compiler"):
        build_library(tmp_path / "cache")


def test_without_a_library_the_reference_runs(monkeypatch, caplog):
    def fail():
        raise NativeBuildError("no compiler here")

    monkeypatch.setattr(library, "build_library", fail)
    with caplog.at_level("WARNING", logger="tandem"):
        assert library.load.__wrapped__() is None
    assert "no compiler here" in caplog.text


@pytest.mark.usefixtures("native")
def test_kernels_share_the_thread_pool_of_torch():
    """A second OpenMP runtime would bring a second pool, whose threads spin against the first."""
    code = (
        "import tandem.ops.native as n; n.load()\n"
        "lines = [line for line in open('/proc/self/maps') if 'libgomp' in line]\n"
        "names = {line.split('/')[-1] for line in lines}\n"
        "assert len(names) == 1, names"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3"])
def test_portable_code_gives_the_same_results(march, tmp_path, monkeypatch):
    portable = open_library(str(build_library(tmp_path, march)))
    assert not portable.tandem_has_bf16_dot()
    x, weight = torch.randn(5, 100).bfloat16(), torch.randn(100)
    tokens = torch.randn(5, 2, 16).half(), torch.randn(5, 2), -torch.rand(2)
    groups = torch.randn(2, 5, 1, 24).half()
    state = torch.randn(5, 2, 16, 24).half()

    def run():
        held = state.clone()
        slots, limit = torch.arange(5), (0.0, 10.0)
        y = ssd.ssd_update(*tokens, *groups, weight[:2], held, slots, weight[2:4], limit)
        rows = torch.tensor([0, 5]), torch.tensor([True])
        z = ssd.ssd_prefill(
            *tokens, *groups, None, held, slots[:1], *rows, weight[2:4], limit, chunk=16
        )
        return norm.gated_rms_norm(x, x, weight, 1e-5, 50), y, z, held

    expected = run()
    for module in (norm, ssd):
        monkeypatch.setattr(module, "kernels", lambda: portable)
    for got, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
    monkeypatch.setattr("tandem.ops.linear.packed.load", lambda: portable)
    assert not PackedLinear(torch.ones(4, 4).bfloat16()).is_native


def test_load_is_one_library():
    assert load() is load()
