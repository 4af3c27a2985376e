"""Each family equals transformers: in any chunks, in any batch, on any ranks, and moved between
engines of unequal size. Transformers itself is held to a loop over tokens first."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem.errors import ShardingError
from tandem.models.loader import load_model
from tandem.models.registry import load_model_config
from tests.equivalence.families.cases import CASES
from tests.equivalence.families.harness import (
    Subject,
    build_subject,
    check,
    feed,
    oracle,
)
from tests.stepper import Stepper, random_tokens


@pytest.fixture(scope="module", params=[*CASES])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return build_subject(CASES[request.param], tmp_path_factory.mktemp(request.param))


def test_transformers_is_causal_and_equals_its_own_loop_over_tokens(subject: Subject) -> None:
    """A naive path that looks ahead, or that loses state between chunks, is no oracle."""
    check(oracle(subject.model, subject.tokens[:21]), subject.logits[:21], "shorter prompt")
    cache, logits = subject.case.new_cache(subject.model), []
    with torch.inference_mode():
        for position, token in enumerate(subject.tokens[:21]):
            where = {"position_ids": torch.tensor([[position]])} if position else {}
            out = subject.model(torch.tensor([[token]]), cache=cache, use_cache=True, **where)
            cache = getattr(out, "cache", cache)
            logits.append(out.logits[0, -1])
    check(torch.stack(logits), subject.logits[:21], "one by one")


def test_chunks_equal_the_whole(subject: Subject) -> None:
    """Then token by token; below the window of a convolution, on and over edges of pages."""
    stepper, tokens = subject.stepper(num_sequences=6), subject.tokens
    for sequence, sizes in enumerate([[40], [1], [2], [3, 13], [37, 3], [16, 2, 3, 1, 20]]):
        check(feed(stepper, sequence, tokens, sizes), subject.logits, f"chunks {sizes}")


def test_rows_of_a_batch_equal_each_alone(subject: Subject) -> None:
    """Decode, fresh and continued rows in one step, in slots and pages of former owners."""
    stepper, tokens = subject.stepper(), subject.tokens
    stepper.step([(sequence, random_tokens(40, seed=2)) for sequence in range(4)])
    for sequence in range(4):
        stepper.forget(sequence)
    stepper.step([(0, tokens[:9]), (1, tokens[:20]), (2, tokens[:2])])
    rows = [(3, tokens[:1]), (1, tokens[20:33]), (0, tokens[9:10]), (2, tokens[2:3])]
    for (_, chunk), logits, start in zip(rows, stepper.step(rows), [0, 20, 9, 2], strict=True):
        check(logits, subject.logits[start : start + len(chunk)], f"row from token {start}")


def test_greedy_ids_equal_those_of_generate(subject: Subject) -> None:
    prompt = subject.tokens[:16]
    generated = subject.model.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, use_cache=True
    )[0, len(prompt) :].tolist()
    stepper, output, chunk = subject.stepper(), [], prompt
    for _ in range(20):
        (logits,) = stepper.step([(0, chunk)])
        chunk = [int(logits[-1].argmax())]
        output += chunk
    assert output == generated
    assert len(set(output)) > 5, "a prompt that repeats one token proves little"


def test_ranks_together_equal_one(subject: Subject) -> None:
    for tp in subject.case.ranks:
        stepper = subject.stepper(tp=tp)
        check(feed(stepper, 0, subject.tokens, [13, 30]), subject.logits, f"tp {tp}")


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1), (4, 2)])
def test_state_moves_between_engines_of_any_size(
    subject: Subject, prefill_tp: int, decode_tp: int
) -> None:
    """Prefill on one, decode on the other, with other pages."""
    if not {prefill_tp, decode_tp} <= {1, *subject.case.ranks}:
        pytest.skip("units of this model do not fit that many ranks")
    prefill = subject.stepper(tp=prefill_tp)
    decode = subject.stepper(tp=decode_tp, page_tokens=12)
    tokens = subject.tokens
    check(feed(prefill, 1, tokens[:37], [37]), subject.logits[:37], "prefill")
    decode.move_from(prefill, 1)
    check(feed(decode, 1, tokens[37:], [1]), subject.logits[37:], "decode")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.make is None])
def test_16_bit_weights_are_as_near_as_transformers(name: str, tmp_path: Path) -> None:
    """To the model with the same weights in fp32. A token may choose another expert, by rounding,
    on either side."""
    case, tokens = CASES[name], random_tokens(24)
    model = case.build(dtype=torch.bfloat16)
    case.save(model, tmp_path)
    theirs = oracle(model, tokens).double()
    rounded = case.build()
    values = dict(model.named_parameters())
    with torch.no_grad():
        for key, parameter in rounded.named_parameters():
            parameter.copy_(values[key].float())
    exact = oracle(rounded, tokens).double()
    ours = feed(Stepper(tmp_path, dtype="bfloat16"), 0, tokens, [20]).double()

    def error(logits: torch.Tensor) -> float:
        return float((logits - exact).norm() / exact.norm())

    assert error(ours) < 2 * error(theirs) + 0.02


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, number) for name, case in CASES.items() for number in range(len(case.refused))],
)
def test_units_that_neither_divide_nor_replicate_are_named(
    name: str, number: int, tmp_path: Path
) -> None:
    case = CASES[name]
    overrides, tp, message = case.refused[number]
    case.save(case.build(**overrides), tmp_path)
    config = load_model_config(tmp_path)
    with pytest.raises(ShardingError, match=message):
        load_model(tmp_path, config, SimpleNamespace(rank=0, size=tp), torch.device("cpu"))
