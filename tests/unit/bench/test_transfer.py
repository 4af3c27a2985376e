"""The benchmark of transfers runs, on a tiny model and a machine that was not measured."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tandem.bench import move_rates, transfer
from tandem.bench.move_rates import PAIRS
from tandem.config.args import build_config
from tandem.models.registry import load_model_config
from tandem.state.spec import build_state_spec
from tests.tiny_models import save_tiny


@pytest.mark.slow
@pytest.mark.nixl
def test_second_tokens_and_moves_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_rates, "measure_copy", lambda: 1e10)
    folder = str(save_tiny("nemotron_h", tmp_path))
    model = load_model_config(folder)
    result = transfer.run_transfer(
        build_config(folder, {"page_tokens": 8, "budget_tokens": 64}),
        model,
        prompts=[20, 200],
        num_rounds=1,
        move_tokens=33,
    )
    rows = result["second_token"]
    assert [(row["num_tokens"], row["mode"]) for row in rows] == [
        (20, "after"),
        (20, "streamed"),
        (200, "after"),
        (200, "streamed"),
    ]
    spec = build_state_spec(model, tp=1, rank=0, page_tokens=8)
    for row in rows:
        assert row["nbytes"] == spec.slot_nbytes + -(-row["num_tokens"] // 8) * spec.page_nbytes
        assert 0 < row["after_first_s"] < row["second_token_s"]
        assert row["mode"] == "streamed" or row["early_share"] == 0
    moves = result["moves"]
    assert [(row["prefill_tp"], row["decode_tp"]) for row in moves[::2]] == list(PAIRS)
    for contiguous, scattered in zip(moves[::2], moves[1::2], strict=True):
        assert (contiguous["placement"], scattered["placement"]) == ("contiguous", "scattered")
        assert contiguous["nbytes"] == scattered["nbytes"] > 0
        assert contiguous["num_descriptors"] <= scattered["num_descriptors"]
    # Equal sizes: 5 pages and a slot, each rank for itself.
    for row, ranks in ((moves[0], 1), (moves[2], 2)):
        assert row["num_descriptors"] == 2 * ranks
    for row, ranks in ((moves[1], 1), (moves[3], 2)):
        assert row["num_descriptors"] == 6 * ranks
    assert moves[0]["nbytes"] == spec.slot_nbytes + 5 * spec.page_nbytes
    text = io.StringIO()
    transfer.render(result, Console(file=text, width=100))
    for words in ("streamed", "scattered", "one thread copies 10.0 GB/s"):
        assert words in text.getvalue()
