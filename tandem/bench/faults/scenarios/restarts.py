"""Engines and routers that go and come back under their address, in order or not."""

import signal
from functools import partial

from tandem.bench.faults.cluster import Server
from tandem.bench.faults.scenarios.scenario import Scenario, reach
from tandem.bench.faults.trial import Trial
from tandem.errors import EngineDeadError

_NUM_RESTARTS = 5
_NUM_STOPS = 3


def _restart_under_load(trial: Trial) -> None:
    """Each side five times: every time another incarnation at the same ports is met anew."""
    for number in range(_NUM_RESTARTS):
        for victim in (trial.cluster.decode[0], trial.cluster.prefill[0]):
            trial.let_run(1.0)
            fault = trial.inject(f"{victim.name} restarted, {number + 1}", victim.kill)
            trial.mend()
            trial.wait_for_affected(fault)


def _end_in_order(trial: Trial, victim: Server) -> None:
    """SIGTERM while its requests run and its prefills are read."""
    for number in range(_NUM_STOPS):
        reach(trial, "reading", victim, trial.cluster.decode[0])
        fault = trial.inject(
            f"SIGTERM of {victim.name}, {number + 1}", partial(_terminate, trial, victim)
        )
        trial.wait_for_affected(fault)
        trial.mend()


def _terminate(trial: Trial, victim: Server) -> None:
    try:
        status = victim.terminate()
    except EngineDeadError as error:
        trial.problems.append(str(error))
        victim.kill()
    else:
        if status != 0:
            trial.problems.append(f"{victim.name} ended with status {status} after SIGTERM")


def _lose_the_router(trial: Trial) -> None:
    """Its clients are cut off, which ends their requests on every engine; then it hangs."""
    router = trial.cluster.router
    trial.may_cut = True  # nobody is left who could tell them
    trial.let_run(2.0)
    fault = trial.inject("router killed", router.kill)
    trial.wait_until(lambda: all(_is_idle(engine) for engine in trial.cluster.engines), "idle")
    trial.mend()
    trial.wait_for_affected(fault)
    trial.let_run(2.0)
    fault = trial.inject("router stopped", partial(router.signal, signal.SIGSTOP))
    trial.let_run(8.0)
    router.signal(signal.SIGCONT)
    trial.wait_for_affected(fault)


def _is_idle(engine: Server) -> bool:
    return bool(engine.pools().get("is_idle"))


SCENARIOS = [
    Scenario(
        "restart",
        "a decode and a prefill engine killed and started again under their ports, 5 times each",
        _restart_under_load,
        is_tcp=True,
    ),
    Scenario(
        "terminate-prefill",
        "SIGTERM of a prefill engine whose prefills are being read, 3 times",
        lambda trial: _end_in_order(trial, trial.cluster.prefill[0]),
        is_tcp=True,
    ),
    Scenario(
        "router",
        "SIGKILL of the router under load, then SIGSTOP for 8 s",
        _lose_the_router,
        is_tcp=True,
    ),
]
