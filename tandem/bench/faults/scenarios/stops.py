"""SIGSTOP of an engine with requests in each state, and SIGCONT after its peers gave it up."""

import os
import signal
from functools import partial

from tandem.bench.faults.cluster import Server
from tandem.bench.faults.scenarios.scenario import STATES, Scenario, hold, reach, release
from tandem.bench.faults.trial import Trial

# Longer than every deadline, so that what the engine sends after it goes on comes too late.
_STOPPED_S = 16.0


def _stop_in_each_state(trial: Trial, role: str) -> None:
    p, d = trial.cluster.prefill[0], trial.cluster.decode[0]
    victim, other = (p, d) if role == "prefill" else (d, p)
    for number, state in enumerate(STATES):
        part = ("all", "core")[number % 2]
        reach(trial, state, p, d)
        hold(state, other)
        fault = trial.inject(
            f"{role} stopped ({part}), {state}", partial(victim.signal, signal.SIGSTOP, part)
        )
        release(state, other)
        trial.wait_for_affected(fault)
        trial.let_run(max(0.0, _STOPPED_S - trial.since(fault)))
        victim.signal(signal.SIGCONT)
        trial.mend()


def _lose_a_rank(trial: Trial) -> None:
    """The others wait for it inside a collective, so the engine is lost with it."""
    p, d = trial.cluster.prefill[0], trial.cluster.decode[0]
    for victim in (p, d):
        for number, what in ((signal.SIGSTOP, "stopped"), (signal.SIGKILL, "killed")):
            reach(trial, "decoding", p, d)
            *_, rank = victim.pids()
            fault = trial.inject(f"a rank of {victim.name} {what}", partial(os.kill, rank, number))
            trial.wait_for_affected(fault)
            if number == signal.SIGKILL:
                trial.wait_until(partial(has_ended, victim), f"{victim.name} has lost a rank")
            victim.signal(signal.SIGCONT)
            trial.let_run(1.0)
            trial.mend()


def has_ended(server: Server) -> bool:
    return not server.is_running()


SCENARIOS = [
    Scenario(
        "ranks",
        "SIGSTOP and SIGKILL of one of two ranks of a prefill and of a decode engine",
        _lose_a_rank,
        is_tcp=True,
        more_flags=dict.fromkeys(("p0", "d0"), ("--tp", "2")),
    ),
    Scenario(
        "stop-prefill",
        "SIGSTOP of a prefill engine in each state of its requests, SIGCONT 16 s later",
        lambda trial: _stop_in_each_state(trial, "prefill"),
        is_tcp=True,
    ),
    Scenario(
        "stop-decode",
        "SIGSTOP of a decode engine in each state of its requests, SIGCONT 16 s later",
        lambda trial: _stop_in_each_state(trial, "decode"),
        is_tcp=True,
    ),
]
