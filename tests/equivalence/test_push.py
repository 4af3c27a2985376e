"""Prefill engines that write into pages which the decode engine reserved: the same answers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.engine.engine import EngineCore
from tests.equivalence.engines import (
    Output,
    assert_equal_outputs,
    build_core,
    run,
    run_apart,
)
from tests.equivalence.test_prefill_decode import (
    LENGTHS,
    MODEL,
    Engines,
    mixed_requests,
)

pytestmark = pytest.mark.nixl

# By tp; pages of equal and of unequal size meet (see test_prefill_decode.py).
TP_PAIRS = [(1, 1), (1, 2), (2, 1), (4, 1), (1, 4)]


@pytest.fixture(scope="module")
def engines(tiny_folder: Callable[[str], Path]) -> Iterator[Engines]:
    engines = Engines(tiny_folder(MODEL), transfer="push")
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def together(tiny_folder: Callable[[str], Path]) -> Iterator[EngineCore]:
    core = build_core(tiny_folder(MODEL), budget_tokens=96)
    yield core
    core.close()


@pytest.fixture(scope="module")
def expected(together: EngineCore) -> list[Output]:
    return run(together, mixed_requests())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), TP_PAIRS, ids=[f"{p} to {d}" for p, d in TP_PAIRS]
)
def test_every_pair_of_sizes_equals_one_engine(
    engines: Engines, expected: list[Output], prefill_tp: int, decode_tp: int
) -> None:
    prefill, decode = engines.get("prefill", prefill_tp), engines.get("decode", decode_tp)
    before = decode.stats()
    assert_equal_outputs(run_apart(prefill, decode, mixed_requests()), expected, LENGTHS)
    after = decode.stats()
    num_moved = sum(item.sampling.max_tokens != 1 for item in mixed_requests())
    assert after["failed_reads_total"] == before["failed_reads_total"]
    assert after["transfer_num_done"] - before["transfer_num_done"] == num_moved
    assert after["prompt_tokens_total"] == before["prompt_tokens_total"]
