"""Runs scenarios one after the other, on clusters that they share, and makes the table."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tandem.bench.faults.cluster import Cluster, Server
from tandem.bench.faults.load import Case, build_cases, known_answers
from tandem.bench.faults.scenarios import SCENARIOS
from tandem.bench.faults.scenarios.scenario import Scenario
from tandem.bench.faults.trial import Result, Trial
from tandem.errors import ConfigError, TandemError
from tandem.log import get_logger

log = get_logger(__name__)

# Small pools, so that requests queue; fp32, so that two tokens are hardly ever a near-tie.
FLAGS = (
    *("--dtype", "float32", "--threads", "1", "--max-model-len", "2048"),
    *("--max-num-seqs", "4", "--budget-tokens", "256", "--arena-mib", "32"),
    *("--lease-s", "15", "--deadline-s", "10", "--log-level", "INFO"),
)
NUM_CASES = 24


def demo_model() -> str:
    return str(files("tandem") / "demo_model")


def choose(names: Sequence[str]) -> list[Scenario]:
    """Raises: ConfigError for a name that is none."""
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise ConfigError(f"scenario={unknown[0]!r}; expected one of {', '.join(SCENARIOS)}")
    return [SCENARIOS[name] for name in names or SCENARIOS]


def find_answers(model: str, folder: Path, cases: Sequence[Case]) -> dict[Case, str]:
    """What one co-located engine says."""
    server = Server("colocated", ["serve", model, *FLAGS], folder)
    try:
        server.start()
        server.wait_until_ready()
        return known_answers(server.url, cases)
    finally:
        server.close()


def run_faults(
    model: str | None,
    scenarios: Sequence[Scenario],
    *,
    flags: Sequence[str] = (),
    folder: Path | None = None,
    tell: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run them all; `tell` hears of each result at once. Logs of the servers stay in `folder`."""
    model = model or demo_model()
    folder = folder or Path(tempfile.mkdtemp(prefix="tandem-faults-"))
    log.info("logs of the servers: %s", folder)
    folder.mkdir(parents=True, exist_ok=True)
    answers = find_answers(model, folder, build_cases(NUM_CASES))
    log.info("%d of %d cases have one right answer", len(answers), NUM_CASES)
    results = []
    with ExitStack() as stack:
        cluster: Cluster | None = None
        needs: tuple[Any, ...] = ()
        for scenario in scenarios:
            reason = scenario.skip_reason()
            if reason is not None:
                results.append(_skipped(scenario.name, reason))
                tell(results[-1])
                continue
            if cluster is None or scenario.needs != needs or scenario.is_alone:
                stack.close()
                where = folder / scenario.name
                cluster = stack.enter_context(scenario.build(model, where, (*FLAGS, *flags)))
                needs = scenario.needs
            results.append(_run(scenario, cluster, answers))
            tell(results[-1])
            if results[-1].problems or scenario.is_alone:
                stack.close()  # the next scenario shall not suffer from this one
                cluster = None
    return results


def _run(scenario: Scenario, cluster: Cluster, answers: dict[Case, str]) -> Result:
    log.info("scenario %s: %s", scenario.name, scenario.about)
    trial = Trial(cluster, answers)
    with trial:
        try:
            scenario.run(trial)
        except TandemError as error:
            trial.problems.append(f"the scenario did not end: {error}")
        result = _finish(trial)
    result.name = scenario.name
    return result


def _finish(trial: Trial) -> Result:
    try:
        return trial.finish()
    except TandemError as error:
        problems = [*trial.problems, f"the engines did not come back: {error}"]
        return Result(trial.faults, trial.load.stop(), problems, 0.0, trial.notes)


def _skipped(name: str, reason: str) -> Result:
    return Result([], [], [], 0.0, {}, name, reason)


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """All results as JSON, with totals."""
    rows = [result.as_json() for result in results]
    totals = {
        name: sum(row[name] for row in rows)
        for name in ("faults", "requests", "right", "lost", "left", "refused", "wrong")
    }
    return {
        "totals": {**totals, "problems": sum(len(row["problems"]) for row in rows)},
        "scenarios": rows,
    }


def render(results: Sequence[Result], console: Console) -> None:
    table = Table(title="Faults")
    names = ("faults", "requests", "lost", "left", "wrong", "recover_median_s", "recover_max_s")
    table.add_column("scenario")
    for name in (*names, "idle_s"):
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("verdict")
    for row in (result.as_json() for result in results):
        if row["skipped"]:
            table.add_row(row["scenario"], *[""] * 8, f"skipped: {row['skipped']}")
            continue
        verdict = f"{len(row['problems'])} problems" if row["problems"] else "ok"
        table.add_row(row["scenario"], *(str(row[name]) for name in (*names, "idle_s")), verdict)
    console.print(table)
    for result in results:
        for problem in result.problems:
            console.print(f"{result.name}: {problem}", markup=False)
