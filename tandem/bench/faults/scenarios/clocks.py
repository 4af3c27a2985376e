"""Engines whose clocks differ by minutes: nothing on the wire is a time of day."""

import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tandem.bench.faults.cluster import HERE, Cluster, Place
from tandem.bench.faults.scenarios.scenario import MORE_FLAGS, Scenario
from tandem.bench.faults.trial import Trial

_SKEW_S = 600


def _shifted() -> tuple[str, ...]:
    """Takes a command into a namespace whose clocks are ahead."""
    skew = str(_SKEW_S)
    return ("unshare", "--time", "--monotonic", skew, "--boottime", skew)


@cache
def _why_not() -> str | None:
    if shutil.which("unshare") is None:
        return "the command `unshare` (util-linux) is missing"
    result = subprocess.run([*_shifted(), "true"], capture_output=True, text=True, check=False)
    if result.returncode:
        return f"no namespaces of clocks: {result.stderr.strip()}"
    return None


class _SkewedScenario(Scenario):
    def skip_reason(self) -> str | None:
        return _why_not()

    def build(self, model: str, folder: Path, flags: Sequence[str]) -> Cluster:
        """One engine of each role is ten minutes ahead of everyone else."""
        ahead = Place(HERE.host, _shifted())
        places = {"p0": ahead, "d1": ahead}
        cluster = Cluster(
            model,
            folder,
            num_prefill=2,
            num_decode=2,
            flags=flags,
            places=places,
            more_flags=MORE_FLAGS,
            environment={"UCX_TLS": "tcp,self"},
        )
        return cluster.start()


def _serve_and_lose_one(trial: Trial) -> None:
    """Every pair of clocks reads from every other; then one that is ahead dies."""
    trial.inject(f"clocks {_SKEW_S} s apart", lambda: trial.let_run(15.0))
    for victim in (trial.cluster.prefill[0], trial.cluster.decode[1]):
        _note_reads(trial)
        fault = trial.inject(f"{victim.name}, ahead by {_SKEW_S} s, killed", victim.kill)
        trial.wait_for_affected(fault)
        trial.mend()
        trial.let_run(8.0)


def _note_reads(trial: Trial) -> None:
    for decode in trial.cluster.decode:
        num_done = decode.pools().get("transfer_num_done")
        trial.notes[f"reads of {decode.name}"] = num_done
        if not num_done:
            trial.problems.append(f"{decode.name} has read from nobody")


SCENARIOS = [
    _SkewedScenario(
        "clocks",
        "clocks of a prefill and of a decode engine ten minutes ahead of the others",
        _serve_and_lose_one,
        is_alone=True,
    ),
]
