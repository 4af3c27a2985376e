"""Who an engine is: its model, its incarnation and its processes.

Two engines may exchange state when their `ModelIdentity` agrees. A `ProcessIdentity` outlives its
process, so that its death can be proven. It knows no memory and no transport.
"""

import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.config.model import ModelConfig
from tandem.state.spec import describe_components, fingerprint

# An id or an address in a message; longer ones are refused when they are decoded.
ShortText = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]

# Speculative decoding would keep more state; engines without it say so.
NO_SPECULATION = "none"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START_TIME_FIELD = 22 - 3  # counted from the state, the first field after the command's name
_NUM_THREADS_FIELD = 20 - 3


class ProcessIdentity(msgspec.Struct, frozen=True):
    """One process of one boot of one host. Empty `boot_id`: its death can never be proven."""

    boot_id: ShortText
    pid_namespace: ShortText
    pid: Count
    start_ticks: int


class ModelIdentity(msgspec.Struct, frozen=True):
    """What a model is and keeps. Two that may exchange state are equal in every field.

    `components`: (layer, name, units, unit_shape, dtype) of each. `settings`: names and values of
    what else decides the state's meaning. `weights`: digest of the checkpoint.
    """

    fingerprint: ShortText
    digest: ShortText
    components: tuple[tuple[Count, ShortText, Count, tuple[Count, ...], ShortText], ...]
    settings: tuple[tuple[ShortText, ShortText], ...] = ()
    weights: ShortText = ""


class EngineIdentity(msgspec.Struct, frozen=True):
    """One incarnation of one engine. `generation` is new at each start. `transfer`: "pull" (decode
    engines read) or "push" (prefill engines write)."""

    engine_id: ShortText
    generation: ShortText
    tp: Count
    process: ProcessIdentity
    model: ModelIdentity
    transfer: ShortText = "pull"


class Difference(msgspec.Struct, frozen=True):
    """The first field in which two identities differ."""

    field: str
    ours: str
    theirs: str


def build_model_identity(
    model: ModelConfig, *, weights: str = "", speculative: str = NO_SPECULATION
) -> ModelIdentity:
    """`weights`: digest of the checkpoint. `speculative`: how tokens are drafted."""
    settings = {
        "number of layers": model.num_layers,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "norm_eps": model.norm_eps,
        "residual_in_fp32": model.residual_in_fp32,
        "speculative": speculative,
    }
    return ModelIdentity(
        fingerprint=fingerprint(model),
        digest=model.digest,
        components=describe_components(model),
        settings=tuple((name, str(value)) for name, value in settings.items()),
        weights=weights,
    )


def find_difference(ours: ModelIdentity, theirs: ModelIdentity) -> Difference | None:
    """The field that differs and both values, or None if the two may exchange state.

    What explains most comes first: other layers have other components and other weights too.
    """
    if ours == theirs:
        return None
    mine, other = dict(ours.settings), dict(theirs.settings)
    for name in mine | other:
        if mine.get(name) != other.get(name):
            return Difference(name, mine.get(name, "unknown"), other.get(name, "unknown"))
    return (
        _component_difference(ours, theirs)
        or _field_difference("digest of the model's shapes", ours.digest, theirs.digest)
        or _field_difference("fingerprint", ours.fingerprint, theirs.fingerprint)
        or _field_difference("digest of the weights", ours.weights, theirs.weights)
        or Difference("order of settings", str(ours.settings), str(theirs.settings))
    )


def _field_difference(field: str, ours: str, theirs: str) -> Difference | None:
    return None if ours == theirs else Difference(field, ours, theirs)


def _component_difference(ours: ModelIdentity, theirs: ModelIdentity) -> Difference | None:
    for mine, other in zip(ours.components, theirs.components, strict=False):
        if mine[:2] != other[:2]:
            # (layer, kind and component): the layers are not in the same order.
            return Difference(
                "layer order", f"{mine[1]} in layer {mine[0]}", f"{other[1]} in layer {other[0]}"
            )
        for name, my_value, other_value in zip(
            ("units", "unit_shape", "dtype"), mine[2:], other[2:], strict=True
        ):
            if my_value != other_value:
                where = f"layer {mine[0]} {mine[1]} {name}"
                return Difference(where, str(my_value), str(other_value))
    return _field_difference(
        "number of components", str(len(ours.components)), str(len(theirs.components))
    )


def current_process() -> ProcessIdentity:
    """This process. Hosts without /proc give an identity whose death is never proven."""
    pid = os.getpid()
    try:
        stat = _read_stat(pid)
        return ProcessIdentity(
            boot_id=_BOOT_ID.read_text().strip(),
            pid_namespace=_namespaces(),
            pid=pid,
            start_ticks=int(stat[_START_TIME_FIELD]),
        )
    except OSError:
        return ProcessIdentity(boot_id="", pid_namespace="", pid=pid, start_ticks=0)


def _namespaces() -> str:
    """Of process ids and of clocks: a process's start time reads differently from another one."""
    names = []
    for kind in ("pid", "time"):
        try:
            names.append(os.readlink(f"/proc/self/ns/{kind}"))
        except FileNotFoundError:
            continue  # a kernel without namespaces of clocks
    return " ".join(names)


def is_proven_dead(process: ProcessIdentity) -> bool:
    """Whether the process has certainly ended. False when this host cannot know.

    Only a process of the same boot and the same process namespace can be judged; a process id that
    was given to another process shows by its start time.
    """
    here = current_process()
    if not process.boot_id or (process.boot_id, process.pid_namespace) != (
        here.boot_id,
        here.pid_namespace,
    ):
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it exists and belongs to someone else
    try:
        stat = _read_stat(process.pid)
    except OSError:
        return False
    if int(stat[_START_TIME_FIELD]) != process.start_ticks:
        return True
    # A zombie whose other threads have ended holds no memory and no sockets any more.
    return stat[0] in "ZX" and int(stat[_NUM_THREADS_FIELD]) <= 1


def _read_stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; the name before it may hold blanks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
