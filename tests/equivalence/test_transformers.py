"""Each family equals transformers on tiny checkpoints, and transformers a loop over tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence.token_loop import TokenLoop
from tests.stepper import Stepper, random_tokens
from tests.tiny_models import TINY, build_tiny

RELATIVE = 1e-4
PAGE_TOKENS = 8
NUM_TOKENS = 46
# Below the window of the convolution, on a page's end, over chunk and page edges.
LENGTHS = [1, 2, 3, 16, 37, 40]


@dataclass
class Case:
    folder: Path
    model: Any
    tokens: list[int]
    logits: torch.Tensor  # of transformers, one forward over all tokens

    def stepper(self, **options: Any) -> Stepper:
        return Stepper(self.folder, page_tokens=PAGE_TOKENS, **options)


@pytest.fixture(scope="module", params=[*TINY])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    _, model = build_tiny(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    tokens = random_tokens(NUM_TOKENS)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return Case(folder, model, tokens, logits)


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < RELATIVE, f"logits differ by {error:.2e} of their scale"
    assert actual.shape == expected.shape


def test_transformers_equals_a_loop_over_tokens(case: Case) -> None:
    check(case.logits, TokenLoop(case.model).tokens(case.tokens))


@pytest.mark.parametrize("length", LENGTHS)
def test_whole_prompt_then_decode(case: Case, length: int) -> None:
    stepper = case.stepper()
    (logits,) = stepper.step([(0, case.tokens[:length])])
    check(logits, case.logits[:length])
    for position in range(length, min(length + 6, NUM_TOKENS)):
        (logits,) = stepper.step([(0, case.tokens[position : position + 1])])
        check(logits, case.logits[position : position + 1])


@pytest.mark.parametrize("sizes", [[16, 24], [1, 1, 38], [37, 3], [2, 3, 1, 20, 14], [8] * 5])
def test_chunked_prompt(case: Case, sizes: list[int]) -> None:
    stepper, start = case.stepper(), 0
    for size in sizes:
        (logits,) = stepper.step([(0, case.tokens[start : start + size])])
        check(logits, case.logits[start : start + size])
        start += size


def test_decode_fresh_and_continued_rows_in_one_batch(case: Case) -> None:
    stepper, tokens = case.stepper(), case.tokens
    stepper.step([(0, tokens[:9]), (1, tokens[:20]), (2, tokens[:2])])
    rows = [(3, tokens[:1]), (1, tokens[20:33]), (0, tokens[9:10]), (2, tokens[2:3])]
    fresh, continued, first, second = stepper.step(rows)
    check(fresh, case.logits[:1])
    check(continued, case.logits[20:33])
    check(first, case.logits[9:10])
    check(second, case.logits[2:3])


@pytest.mark.parametrize("length", [1, 2, 3, 30])
def test_slot_of_a_former_owner_does_not_show(case: Case, length: int) -> None:
    stepper = case.stepper()
    stepper.step([(0, random_tokens(40, seed=2))])
    stepper.forget(0)
    (logits,) = stepper.step([(0, case.tokens[:length])])
    check(logits, case.logits[:length])


def test_greedy_ids_equal_those_of_generate(case: Case) -> None:
    prompt = case.tokens[:16]
    generated = case.model.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, use_cache=True
    )[0, len(prompt) :].tolist()
    stepper, output = case.stepper(), []
    chunk = prompt
    for _ in range(20):
        (logits,) = stepper.step([(0, chunk)])
        chunk = [int(logits[-1].argmax())]
        output += chunk
    assert output == generated
    assert len(set(output)) > 5, "a prompt that repeats one token proves little"


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("nemotron_h", {"use_bias": True, "mlp_bias": True, "n_groups": 1}),
        ("nemotron_h", {"use_conv_bias": False, "conv_kernel": 2, "tie_word_embeddings": True}),
        ("nemotron_h", {"num_key_value_heads": 4, "vocab_size": 509, "head_dim": 24}),
        ("nemotron_h_moe", {"norm_topk_prob": False, "mlp_bias": True}),
        ("nemotron_h_moe", {"n_group": 1, "topk_group": 1}),
        ("nemotron_h_latent", {"mlp_bias": True}),
        ("bamba", {"attention_bias": True, "mamba_proj_bias": True, "mlp_bias": True}),
        ("bamba", {"mamba_n_groups": 1, "tie_word_embeddings": True, "mamba_conv_bias": False}),
    ],
)
def test_variants_of_a_config(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    _, model = build_tiny(name, **overrides)
    model.save_pretrained(tmp_path)
    tokens = random_tokens(21, vocab_size=500)
    expected = model(torch.tensor([tokens]), use_cache=False).logits[0].detach()
    stepper = Stepper(tmp_path)
    (whole,) = stepper.step([(0, tokens[:20])])
    (decoded,) = stepper.step([(0, tokens[20:])])
    check(torch.cat([whole, decoded]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TINY)
def test_16_bit_weights(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """As close to the fp32 model as transformers is in the same dtype."""
    _, model = build_tiny(name, dtype=dtype)
    model.save_pretrained(tmp_path)
    tokens = random_tokens(21)
    exact = TokenLoop(model).tokens(tokens)
    theirs = model(torch.tensor([tokens]), use_cache=False).logits[0].detach().double()
    stepper = Stepper(tmp_path)
    (whole,) = stepper.step([(0, tokens[:20])])
    (decoded,) = stepper.step([(0, tokens[20:])])
    ours = torch.cat([whole, decoded]).double()
    error = (ours - exact).square().mean().sqrt()
    assert error < 1.5 * (theirs - exact).square().mean().sqrt()
    assert error < 0.2 * exact.square().mean().sqrt()
