"""The offline benchmark runs, on a tiny model and a machine that was not measured."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tandem.bench import offline
from tandem.bench.limits import Machine
from tandem.config.args import build_config
from tests.tiny_models import save_tiny

MACHINE = Machine(bytes_per_s=1e10, flops_per_s=1e11, threads=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("nemotron_h", tmp_path_factory.mktemp("bench") / "tiny")


def test_every_figure_stands_beside_its_floor(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def measure(num_threads: int) -> Machine:
        threads.append(num_threads)
        return MACHINE

    monkeypatch.setattr(offline, "measure_machine", measure)
    result = offline.run_offline(
        build_config(str(tiny), {"threads": 1}),
        prefill_tokens=[32, 48],
        batches=[1, 3],
        num_steps=4,
        num_rounds=2,
    )
    assert threads == [1]
    assert (result["model"], result["dtype"], result["threads"]) == ("tiny", "float32", 1)
    assert result["machine"] == {"gbytes_per_s": 10.0, "gflops_per_s": 100.0}
    assert [row["what"] for row in result["rows"]] == [
        "prefill 32",
        "prefill 48",
        "decode batch 1",
        "decode batch 3",
    ]
    for row, num_tokens in zip(result["rows"], (32, 48, 1, 3), strict=True):
        assert row["tokens_per_s"] == pytest.approx(num_tokens / row["ms"] * 1e3)
        assert row["share_of_floor"] == row["tokens_per_s"] / row["floor_tokens_per_s"]
        assert row["floor_tokens_per_s"] > 0
    assert json.loads(json.dumps(result)) == result
    screen = io.StringIO()
    offline.render(result, Console(file=screen, width=120))
    for row in result["rows"]:
        assert row["what"] in screen.getvalue()


def test_prompts_are_repeatable_and_within_the_vocabulary() -> None:
    prompt = offline.random_prompt(1, 200, 50)
    assert prompt == offline.random_prompt(1, 200, 50) != offline.random_prompt(2, 200, 50)
    assert len(prompt) == 200
    assert 0 <= min(prompt) <= max(prompt) < 50
