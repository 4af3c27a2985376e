"""What a scenario is, and the states of requests in which engines are broken."""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.bench.faults.cluster import Cluster, Server
from tandem.bench.faults.trial import Trial

# One decode engine keeps pages of earlier prompts, the other reads every page each time.
MORE_FLAGS = {"d1": ("--no-prefix-cache",)}


@dataclass(frozen=True)
class Scenario:
    """`run` breaks things; load runs before, meanwhile and after. Clusters are shared by scenarios
    of the same needs."""

    name: str
    about: str
    run: Callable[[Trial], None]
    num_prefill: int = 2
    num_decode: int = 2
    is_tcp: bool = False  # UCX over TCP, as between hosts
    flags: tuple[str, ...] = ()
    more_flags: Mapping[str, Sequence[str]] = field(default_factory=lambda: MORE_FLAGS)
    is_alone: bool = False  # its cluster serves no other scenario

    @property
    def needs(self) -> tuple[object, ...]:
        """Scenarios of equal needs may share a cluster."""
        return self.num_prefill, self.num_decode, self.is_tcp, self.flags, str(self.more_flags)

    def skip_reason(self) -> str | None:
        """Why it cannot run on this machine, or None."""
        return None

    def build(self, model: str, folder: Path, flags: Sequence[str]) -> Cluster:
        cluster = Cluster(
            model,
            folder,
            num_prefill=self.num_prefill,
            num_decode=self.num_decode,
            flags=(*flags, *self.flags),
            more_flags=self.more_flags,
            environment={"UCX_TLS": "tcp,self"} if self.is_tcp else {},
        )
        return cluster.start()


# Where a request may be when its engine breaks.
STATES = ("queued", "prefilling", "waiting for D", "handshaking", "reading", "decoding")


def reach(trial: Trial, state: str, p: Server, d: Server) -> None:
    """Send requests until some of them are in `state` on prefill engine `p` and decode engine `d`.

    Handshakes and reads are over in milliseconds: they are held by stopping the other side, which
    goes on once the victim has been dealt with (`release`).
    """
    cases = sorted(trial.answers, key=lambda case: len(case.prompt))
    long_prompts, long_answers = cases[-8:], sorted(cases, key=lambda case: case.max_tokens)[-8:]
    if state in ("queued", "prefilling"):
        trial.load.burst(long_prompts)
        key = "waiting" if state == "queued" else "running"
        trial.wait_until(lambda: p.pools().get(key), f"a request {state} on {p.name}")
    elif state == "waiting for D":
        trial.load.burst(long_answers[:7])
        trial.wait_until(lambda: _is_waiting(d), f"a request that waits for {d.name}")
    elif state in ("handshaking", "reading"):
        trial.load.burst(long_prompts[:4])
        trial.wait_until(
            lambda: p.pools().get("running") or p.pools().get("held_slots"), f"{p.name} works"
        )
    else:
        trial.load.burst(long_answers[:3])
        trial.wait_until(lambda: d.pools().get("running"), f"{d.name} decodes")


def _is_waiting(d: Server) -> bool:
    pools = d.pools()
    return bool(pools.get("waiting") or pools.get("reading"))


def hold(state: str, other: Server) -> None:
    """Stop the other side of a handshake or of a read, so that it lasts."""
    if state in ("handshaking", "reading"):
        other.signal(signal.SIGSTOP, "core")


def release(state: str, other: Server) -> None:
    if state in ("handshaking", "reading"):
        other.signal(signal.SIGCONT, "core")
