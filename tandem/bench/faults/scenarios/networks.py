"""Packets delayed, dropped and cut between engines in network namespaces of their own."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tandem.bench.faults.cluster import Cluster
from tandem.bench.faults.network import Network, Rule, why_not
from tandem.bench.faults.scenarios.scenario import MORE_FLAGS, Scenario, reach
from tandem.bench.faults.trial import Trial
from tandem.config.secret import SECRET_VARIABLE, new_cluster_secret

_CUT_S = 16.0
_SLOW = Rule(delay_s=0.05, jitter_s=0.05)


class NetworkCluster(Cluster):
    """Each engine in a namespace of its own; the router stays outside."""

    def __init__(self, model: str, folder: Path, flags: Sequence[str]) -> None:
        names = ["p0", "p1", "d0", "d1"]
        self.network = Network(names)
        try:
            super().__init__(
                model,
                folder,
                num_prefill=2,
                num_decode=2,
                flags=flags,
                more_flags=MORE_FLAGS,
                environment={
                    "UCX_TLS": "tcp,self",
                    # Beyond loopback, engines and router prove it to each other.
                    SECRET_VARIABLE: new_cluster_secret(),
                },
                places={name: self.network.place(name) for name in names},
                environments={
                    name: {"UCX_NET_DEVICES": self.network.device(name)} for name in names
                },
            )
        except BaseException:
            self.network.close()
            raise

    def close(self) -> None:
        super().close()
        self.network.close()


class _NetworkScenario(Scenario):
    @property
    def needs(self) -> tuple[object, ...]:
        return ("network",)

    def skip_reason(self) -> str | None:
        return why_not()

    def build(self, model: str, folder: Path, flags: Sequence[str]) -> Cluster:
        return NetworkCluster(model, folder, flags).start()


def _network(trial: Trial) -> Network:
    assert isinstance(trial.cluster, NetworkCluster)
    return trial.cluster.network


def _set(network: Network, links: list[tuple[str, str]], rule: Rule) -> None:
    for one, other in links:
        network.set_rule(one, other, rule)


_BETWEEN_ENGINES = [("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")]
_TO_ROUTER = [("", name) for name in ("p0", "p1", "d0", "d1")]


def _delay_and_drop(trial: Trial) -> None:
    """Every answer comes, and is right; only later."""
    network = _network(trial)
    for what, links, rule in (
        ("50 to 100 ms between engines", _BETWEEN_ENGINES, _SLOW),
        ("2 % of packets lost everywhere", _BETWEEN_ENGINES + _TO_ROUTER, Rule(loss=0.02)),
        (
            "50 to 100 ms and 10 % lost between engines",
            _BETWEEN_ENGINES,
            Rule(_SLOW.delay_s, _SLOW.jitter_s, 0.1),
        ),
    ):
        dropped = network.num_dropped
        trial.inject(what, partial(_set, network, links, rule))
        trial.let_run(15.0)
        network.clear()
        trial.notes[f"packets dropped: {what}"] = network.num_dropped - dropped
        trial.mend()


def _cut(trial: Trial, cuts: Callable[[], list[tuple[str, list[tuple[str, str]]]]]) -> None:
    """Nothing passes for longer than every deadline; then all does."""
    network = _network(trial)
    for state, links in cuts():
        reach(trial, state, trial.cluster.prefill[0], trial.cluster.decode[0])
        names = ", ".join(f"{one or 'router'}-{other}" for one, other in links)
        fault = trial.inject(
            f"{names} cut, {state}", partial(_set, network, links, Rule(is_cut=True))
        )
        trial.wait_for_affected(fault)
        trial.let_run(max(0.0, _CUT_S - trial.since(fault)))
        network.clear()
        trial.mend()


def _engine_cuts() -> list[tuple[str, list[tuple[str, str]]]]:
    return [
        ("reading", [("p0", "d0"), ("p0", "d1")]),
        ("waiting for D", [("p0", "d0")]),
        ("decoding", [("p1", "d1")]),
    ]


def _router_cuts() -> list[tuple[str, list[tuple[str, str]]]]:
    return [("prefilling", [("", "p0")]), ("decoding", [("", "d0")])]


SCENARIOS = [
    _NetworkScenario(
        "network-slow", "packets delayed and dropped between four namespaces", _delay_and_drop
    ),
    _NetworkScenario(
        "network-cut-engines",
        "prefill and decode engines cut from each other for 16 s",
        lambda trial: _cut(trial, _engine_cuts),
    ),
    _NetworkScenario(
        "network-cut-router",
        "the router cut from an engine for 16 s",
        lambda trial: _cut(trial, _router_cuts),
    ),
]
