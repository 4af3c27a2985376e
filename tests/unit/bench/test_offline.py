"""The offline benchmark runs, on a tiny model and a machine that was not measured."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tandem.bench import offline
from tandem.bench.limits import Machine
from tandem.config.args import build_config
from tandem.errors import ConfigError
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
    cases = offline.default_cases(
        False,
        prompts=["32", "2x48"],
        batches=[1, 3],
        mixed="4x20x6",
        num_steps=4,
        num_rounds=2,
        profiled=[3],
    )
    saved: list[dict] = []
    result = offline.run_offline(
        build_config(str(tiny), {"threads": 1}),
        cases,
        lambda found: saved.append(json.loads(json.dumps(found))),
    )
    assert [len(found["rows"]) for found in saved] == [1, 2, 3, 4, 5]
    assert threads == [1]
    assert (result["model"], result["dtype"], result["threads"]) == ("tiny", "float32", 1)
    assert result["machine"] == {"gbytes_per_s": 10.0, "gflops_per_s": 100.0}
    assert [row["what"] for row in result["rows"]] == [
        "decode batch 1",
        "decode batch 3",
        "prefill 32",
        "prefill 2 x 48",
        "mixed 4 x (20 in, 6 out)",
    ]
    for row, num_tokens in zip(result["rows"], (1, 3, 32, 96, 24), strict=True):
        assert row["tokens_per_s"] == pytest.approx(num_tokens / row["ms"] * 1e3)
        assert row["share_of_floor"] == row["tokens_per_s"] / row["floor_tokens_per_s"]
        assert row["floor_tokens_per_s"] > 0
        assert (row["host_ms"] is not None) == row["what"].startswith("decode")
        assert row["touched_experts"] is None
    for row in result["rows"][:2]:
        assert row["host_ms"] > 0
    memory = result["memory"]
    assert memory["arena_nbytes"] == memory["num_slabs"] * memory["slab_nbytes"]
    # Room for what is measured, and not much more.
    assert 3 * memory["slot_nbytes"] < memory["arena_nbytes"] < 4 << 20
    assert result["startup_s"] > 0
    profile = result["profiles"]["decode batch 3"]
    assert profile["wall_ms"] > 0
    assert sum(kernel["launches"] for kernel in profile["kernels"]) == profile["launches"] > 50
    assert json.loads(json.dumps(result)) == result
    screen = io.StringIO()
    offline.render(result, Console(file=screen, width=120))
    for row in result["rows"]:
        assert row["what"] in screen.getvalue()


def test_touched_experts_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "measure_machine", lambda threads: MACHINE)
    folder = save_tiny("nemotron_h_moe", tmp_path)  # 8 experts, 3 a token
    cases = offline.default_cases(False, prompts=["none"], batches=[1, 6], num_steps=2)
    rows = offline.run_offline(build_config(str(folder), {"threads": 1}), cases)["rows"]
    assert rows[0]["touched_experts"] == 3
    assert 3 < rows[1]["touched_experts"] <= 8


def test_rows_may_share_prompts_and_requests_may_come_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "measure_machine", lambda threads: MACHINE)
    folder = save_tiny("nemotron_h_moe", tmp_path / "moe")
    cases = offline.default_cases(
        False, prompts=["none"], batches=[4], mixed="5x12x3x2", num_steps=2, num_distinct=1
    )
    assert cases.num_rows == 8
    rows = offline.run_offline(build_config(str(folder), {"threads": 1}), cases)["rows"]
    assert [row["what"] for row in rows] == [
        "decode batch 4, 1 prompts",
        "mixed 5 x (12 in, 3 out), 2 at once",
    ]
    # Equal rows choose equal experts.
    assert rows[0]["touched_experts"] == 3
    assert rows[1]["tokens_per_s"] == pytest.approx(15 / rows[1]["ms"] * 1e3)


def test_the_defaults_of_a_gpu_are_those_of_its_figures() -> None:
    cases = offline.default_cases(True)
    assert [item.name for item in cases.prompts] == ["1024", "8192", "30000", "16 x 8192"]
    assert cases.batches == (1, 8, 32, 64, 128, 256)
    assert cases.mix == offline.Mix(512, 1024, 256)
    assert (cases.decode_prompt, cases.num_steps, cases.num_rows) == (512, 128, 256)
    # No sequence ends while others are still being prefilled or timed.
    assert cases.num_answer_tokens(256) > 128 + 256 * 512 // cases.budget_tokens


@pytest.mark.parametrize("text", ["", "x", "1x", "1x2x3", "a", "16x-1", "0", "²"])
def test_prompts_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="prefill_tokens="):
        offline.default_cases(False, prompts=[text])


@pytest.mark.parametrize("text", ["512", "512x1024", "0x1x1", "1x1x1x0", "1x1x1x1x1"])
def test_a_mix_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="mixed="):
        offline.default_cases(False, mixed=text)


def test_prompts_are_repeatable_and_within_the_vocabulary() -> None:
    prompt = offline.random_prompt(1, 200, 50)
    assert prompt == offline.random_prompt(1, 200, 50) != offline.random_prompt(2, 200, 50)
    assert len(prompt) == 200
    assert 0 <= min(prompt) <= max(prompt) < 50
