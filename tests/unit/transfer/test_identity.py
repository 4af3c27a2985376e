import os
import shutil
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest

from tandem.transfer.identity import (
    ProcessIdentity,
    build_model_identity,
    current_process,
    find_difference,
    is_proven_dead,
)
from tests.unit.state.layouts import attention, mamba2, model
from tests.unit.transfer.memory import hybrid


def identity_of(process: subprocess.Popen) -> ProcessIdentity:
    """What `current_process` says inside the child."""
    return msgspec.json.decode(process.stdout.readline(), type=ProcessIdentity)


SAY = (
    "import sys, msgspec; from tandem.transfer.identity import current_process as c;"
    "print(msgspec.json.encode(c()).decode(), flush=True); sys.stdin.read()"
)


def test_the_death_of_a_process_is_proven_before_and_after_it_is_reaped():
    child = subprocess.Popen(
        [sys.executable, "-c", SAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        identity = identity_of(child)
        assert not is_proven_dead(identity)
        child.kill()
        # A zombie until the parent waits for it.
        while not is_proven_dead(identity):
            assert child.returncode is None
    assert is_proven_dead(identity)


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of clocks need root")
def test_a_living_process_under_another_clock_is_not_dead():
    """Its start time reads differently from here, like that of a reused process id."""
    shifted = ["unshare", "--time", "--boottime", "300", "--monotonic", "300"]
    if shutil.which("unshare") is None or subprocess.run([*shifted, "true"]).returncode:
        pytest.skip("this system has no namespaces of clocks")
    child = subprocess.Popen(
        [*shifted, sys.executable, "-c", SAY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        identity = identity_of(child)
        assert identity.boot_id == current_process().boot_id
        assert identity.start_ticks > current_process().start_ticks + 10_000
        assert not is_proven_dead(identity)
        child.kill()


def test_a_reused_process_id_is_another_process():
    here = current_process()
    assert not is_proven_dead(here)
    other = ProcessIdentity(here.boot_id, here.pid_namespace, here.pid, here.start_ticks - 1)
    assert is_proven_dead(other)


@pytest.mark.parametrize("field", ["boot_id", "pid_namespace"])
def test_processes_elsewhere_are_never_judged(field):
    here = current_process()
    values = {"boot_id": here.boot_id, "pid_namespace": here.pid_namespace, field: "elsewhere"}
    assert not is_proven_dead(ProcessIdentity(**values, pid=2**22 - 1, start_ticks=1))
    assert not is_proven_dead(ProcessIdentity("", "", 2**22 - 1, 1))


BASE = ((mamba2(4, 2),), (attention(2, 4),))


@pytest.mark.parametrize(
    ("other", "field", "ours", "theirs"),
    [
        (model(*BASE, state_dtype="bfloat16"), "layer 0 mamba2.ssm dtype", "float32", "bfloat16"),
        (model(*BASE, dtype="float32"), "layer 0 mamba2.conv.x dtype", "bfloat16", "float32"),
        (
            model((mamba2(4, 2, conv_kernel=3),), BASE[1]),
            "layer 0 mamba2.conv.x unit_shape",
            "(2, 3)",
            "(2, 2)",
        ),
        (model(BASE[0], (attention(4, 4),)), "layer 1 attention.kv units", "2", "4"),
        (model(*BASE, BASE[1]), "number of layers", "2", "3"),
        (
            model(BASE[1], BASE[0]),
            "layer order",
            "mamba2.conv.x in layer 0",
            "attention.kv in layer 0",
        ),
        (model(BASE[0], (*BASE[1], mamba2(4, 2))), "number of components", "5", "9"),
        (replace(model(*BASE), vocab_size=17), "vocab_size", "16", "17"),
        (replace(model(*BASE), norm_eps=1e-6), "norm_eps", "1e-05", "1e-06"),
    ],
)
def test_a_difference_names_the_field_and_both_values(other, field, ours, theirs):
    found = find_difference(build_model_identity(model(*BASE)), build_model_identity(other))
    assert (found.field, found.ours, found.theirs) == (field, ours, theirs)


def test_equal_models_do_not_differ_and_other_shapes_do():
    ours = build_model_identity(hybrid())
    assert find_difference(ours, build_model_identity(hybrid())) is None
    other = build_model_identity(replace(hybrid(), digest="other"))
    assert find_difference(ours, other).field == "digest of the model's shapes"


@pytest.mark.parametrize(
    ("setting", "field", "ours", "theirs"),
    [
        ({"weights": "b"}, "digest of the weights", "a", "b"),
        ({"weights": "a", "speculative": "3 tokens"}, "speculative", "none", "3 tokens"),
    ],
)
def test_engines_of_one_architecture_differ_by_weights_and_settings(setting, field, ours, theirs):
    mine = build_model_identity(hybrid(), weights="a")
    found = find_difference(mine, build_model_identity(hybrid(), **setting))
    assert (found.field, found.ours, found.theirs) == (field, ours, theirs)


def test_identities_that_differ_in_anything_are_never_taken_for_equal():
    ours = build_model_identity(hybrid(), weights="a")
    for name in ("fingerprint", "digest", "weights"):
        theirs = msgspec.structs.replace(ours, **{name: "other"})
        assert find_difference(ours, theirs).theirs == "other"
    assert find_difference(ours, msgspec.structs.replace(ours, settings=())) is not None
    swapped = msgspec.structs.replace(ours, settings=ours.settings[::-1])
    assert find_difference(ours, swapped).field == "order of settings"
