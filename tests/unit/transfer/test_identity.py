import subprocess
import sys
from dataclasses import replace

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
    words = process.stdout.readline().split()
    return ProcessIdentity(words[0], words[1], int(words[2]), int(words[3]))


SAY = (
    "import sys; from tandem.transfer.identity import current_process as c; p = c();"
    "print(p.boot_id, p.pid_namespace, p.pid, p.start_ticks, flush=True); sys.stdin.read()"
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
        (model(*BASE, BASE[1]), "number of components", "5", "6"),
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
