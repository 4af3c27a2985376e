"""SIGKILL of an engine with requests in each state; the engine comes back under its address."""

from functools import partial

from tandem.bench.faults.cluster import Server
from tandem.bench.faults.scenarios.scenario import STATES, Scenario, hold, reach, release
from tandem.bench.faults.trial import Trial

_NUM_READERS = 20


def _kill_in_each_state(trial: Trial, role: str) -> None:
    p, d = trial.cluster.prefill[0], trial.cluster.decode[0]
    victim, other = (p, d) if role == "prefill" else (d, p)
    for number, state in enumerate(STATES):
        # In turns the whole engine, as when its machine dies, and its core alone.
        part = ("all", "core")[number % 2]
        if state == "handshaking":
            _make_strangers(trial, other)
        reach(trial, state, p, d)
        hold(state, other)
        if state in ("handshaking", "reading"):
            trial.let_run(0.3)
        fault = trial.inject(f"{role} killed ({part}), {state}", partial(victim.kill, part))
        release(state, other)
        trial.wait_for_affected(fault)
        trial.mend()


def _make_strangers(trial: Trial, server: Server) -> None:
    """A new incarnation, which has to be met before anything is read."""
    server.kill()
    trial.mend()


def _kill_readers(trial: Trial) -> None:
    """Their source lives on, or (UCX over TCP may abort it) its requests do."""
    p, d = trial.cluster.prefill[0], trial.cluster.decode[0]
    num_lost = 0
    for number in range(_NUM_READERS):
        reach(trial, "reading", p, d)
        is_stalled = number % 2 == 1
        if is_stalled:
            hold("reading", p)
        fault = trial.inject(f"reader killed, {number + 1}", partial(d.kill, "core"))
        if is_stalled:
            release("reading", p)
        trial.wait_for_affected(fault)
        trial.let_run(1.0)
        num_lost += not p.is_running()
        trial.mend()
    trial.notes["sources that ended with their readers"] = num_lost


SCENARIOS = [
    Scenario(
        "kill-readers",
        f"SIGKILL of a decode engine in the middle of a read, {_NUM_READERS} times, every other "
        "time with a stalled source",
        _kill_readers,
        is_tcp=True,
    ),
    Scenario(
        "kill-prefill",
        "SIGKILL of a prefill engine in each state of its requests",
        lambda trial: _kill_in_each_state(trial, "prefill"),
        is_tcp=True,
    ),
    Scenario(
        "kill-decode",
        "SIGKILL of a decode engine in each state of its requests",
        lambda trial: _kill_in_each_state(trial, "decode"),
        is_tcp=True,
    ),
]
