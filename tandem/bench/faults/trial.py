"""One scenario being run: load on a cluster, faults put in, and what came of it.

After the faults every engine runs again, no request runs, and the trial looks whether memory is
back and no process has grown.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.bench.faults import procfs
from tandem.bench.faults.cluster import Cluster, Server, wait_for
from tandem.bench.faults.load import Case, Load, Outcome, ask_all
from tandem.errors import EngineDeadError

# What a process may hold more of after a scenario than before: caches of allocators, connections
# that are kept for a while.
MAX_RSS_GROWTH_MIB = 48.0
MAX_THREAD_GROWTH = 2
_SETTLE_S = 60.0


@dataclass
class Fault:
    """Something that was broken at a moment. `silences`: how long each client that was being
    served then waited for its next word."""

    what: str
    at: float
    silences: list[float] = field(default_factory=list)

    @property
    def recover_s(self) -> float:
        return max(self.silences, default=0.0)


@dataclass
class Limits:
    """What a trial holds the engines to."""

    recover_s: float = 15.0  # the deadline of 10 s, and what the work itself takes meanwhile
    num_fds: int = 12  # more than before in one process
    idle_s: float = 45.0  # until every page and slot is free again: a lease, and then some


class Trial:
    """Load and faults on a running cluster.

    Args:
        answers: of cases, by case.
        concurrency: background clients.
        may_cut: whether connections may end without a word (who answers them was killed).
    """

    def __init__(
        self,
        cluster: Cluster,
        answers: dict[Case, str],
        *,
        concurrency: int = 3,
        limits: Limits | None = None,
        seed: int = 0,
    ) -> None:
        self.cluster = cluster
        self.answers = answers
        self.limits = limits or Limits()
        self.may_cut = False
        self.faults: list[Fault] = []
        self.problems: list[str] = []
        self.notes: dict[str, Any] = {}
        self._warm_up()
        self._before = self._holdings()
        self.load = Load(cluster.router.url, answers, concurrency=concurrency, seed=seed)

    def _warm_up(self) -> None:
        """Every engine serves some requests, so that what comes later is growth."""
        cases = sorted(self.answers, key=lambda case: len(case.prompt))
        longest = cases[-1:] * 2 * len(self.cluster.engines)
        ask_all(self.cluster.router.url, [*cases[:8], *longest], concurrency=8)

    def _holdings(self) -> dict[int, tuple[str, procfs.Holdings]]:
        found = {}
        for server in self.cluster.servers:
            for pid in server.pids():
                holdings = procfs.holdings(pid)
                if holdings is not None:
                    found[pid] = (server.name, holdings)
        return found

    def __enter__(self) -> "Trial":
        self.load.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.load.stop()

    def inject(self, what: str, action: Callable[[], object]) -> Fault:
        """Break something now."""
        fault = Fault(what, time.monotonic())
        self.faults.append(fault)
        action()
        return fault

    def let_run(self, seconds: float) -> None:
        """Give what was broken time to show."""
        time.sleep(seconds)

    @staticmethod
    def since(fault: Fault) -> float:
        return time.monotonic() - fault.at

    def wait_until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
        return wait_for(condition, timeout_s, what)

    def mend(self) -> None:
        """Everything runs again, and the router uses it."""
        self.cluster.mend()

    def wait_for_affected(self, fault: Fault) -> None:
        """Until every request that ran at the fault has had a word since, or has ended."""

        def is_over() -> bool:
            return all(
                outcome.kind != "running" or (outcome.heard and outcome.heard[-1] > fault.at)
                for outcome in list(self.load.outcomes)
                if outcome.sent <= fault.at
            )

        wait_for(is_over, _SETTLE_S, f"clients wait for ever after {fault.what}")

    def finish(self) -> "Result":
        """Stop the load, look at everything, and judge."""
        outcomes = self.load.stop()
        self.mend()
        for fault in self.faults:
            silences = [outcome.silence_after(fault.at) for outcome in outcomes]
            fault.silences = [silence for silence in silences if silence is not None]
            if fault.recover_s > self.limits.recover_s:
                self.problems.append(
                    f"{fault.what}: a client waited {fault.recover_s:.1f} s "
                    f"(limit {self.limits.recover_s:g} s)"
                )
        self._judge(outcomes)
        idle_s = self._wait_until_idle()
        self._compare_holdings()
        return Result(self.faults, outcomes, self.problems, idle_s, self.notes)

    def _judge(self, outcomes: Sequence[Outcome]) -> None:
        bad = {"wrong", "hung"} if self.may_cut else {"wrong", "hung", "cut", "refused"}
        for outcome in outcomes:
            if outcome.kind in bad:
                self.problems.append(f"{outcome.kind}: {outcome.detail}")

    def _wait_until_idle(self) -> float:
        """Seconds until all memory of all engines was free again."""
        start = time.monotonic()
        busy: list[Server] = list(self.cluster.engines)

        def is_idle() -> bool:
            busy[:] = [server for server in busy if not server.pools().get("is_idle")]
            return not busy

        try:
            wait_for(is_idle, self.limits.idle_s, "memory is not back")
        except EngineDeadError:
            for server in busy:
                held = {
                    name: value
                    for name, value in server.pools().items()
                    if value and name.split("_")[0] in ("active", "held", "quarantined", "leases")
                }
                self.problems.append(f"memory of {server.name} is not back: {held}")
        return time.monotonic() - start

    def _compare_holdings(self) -> None:
        """Processes that lived through it all hold what they held before."""
        growth: dict[str, dict[str, float]] = {}
        for pid, (server, before) in self._before.items():
            after = procfs.holdings(pid)
            if after is None:
                continue
            grown = {
                "rss_mib": round(after.rss_mib - before.rss_mib, 1),
                "threads": after.num_threads - before.num_threads,
                "fds": after.num_fds - before.num_fds,
            }
            name = f"{server} {before.name.rpartition('.')[2]}"
            growth[name] = grown
            limits = (MAX_RSS_GROWTH_MIB, MAX_THREAD_GROWTH, self.limits.num_fds)
            for (what, value), limit in zip(grown.items(), limits, strict=True):
                if value > limit:
                    self.problems.append(f"{name} has grown: {what} by {value} (limit {limit:g})")
        self.notes["growth"] = growth


@dataclass
class Result:
    """What became of a scenario."""

    faults: list[Fault]
    outcomes: list[Outcome]
    problems: list[str]
    idle_s: float
    notes: dict[str, Any]
    name: str = ""
    skipped: str | None = None

    def as_json(self) -> dict[str, Any]:
        kinds = [outcome.kind for outcome in self.outcomes]
        recover = [fault.recover_s for fault in self.faults]
        return {
            "scenario": self.name,
            "skipped": self.skipped,
            "faults": len(self.faults),
            "requests": len(kinds),
            "right": kinds.count("right"),
            "lost": sum(kinds.count(kind) for kind in ("error", "cut", "hung")),
            "left": kinds.count("left"),
            "refused": kinds.count("refused"),
            "wrong": kinds.count("wrong"),
            "recover_median_s": round(statistics.median(recover), 2) if recover else 0.0,
            "recover_max_s": round(max(recover), 2) if recover else 0.0,
            "idle_s": round(self.idle_s, 2),
            "problems": self.problems,
            "by_fault": [
                {"what": fault.what, "recover_s": round(fault.recover_s, 2)}
                for fault in self.faults
            ],
            "errors": sorted({outcome.detail for outcome in self.outcomes if outcome.detail})[:20],
            **self.notes,
        }


def skipped(name: str, reason: str) -> Result:
    return Result([], [], [], 0.0, {}, name, reason)
