"""A family's tiny model twice: in transformers, and as the checkpoint that Tandem loads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.equivalence.families.cases import VOCAB, Case
from tests.stepper import Stepper, random_tokens

RELATIVE = 1e-4
NUM_TOKENS = 46


@dataclass
class Subject:
    """`logits`: of transformers for all `tokens`, in one forward."""

    case: Case
    folder: Path
    model: Any
    tokens: list[int]
    logits: torch.Tensor

    def stepper(self, **options: Any) -> Stepper:
        return Stepper(self.folder, **{"page_tokens": 8, "dtype": "float32", **options})


def build_subject(case: Case, folder: Path) -> Subject:
    model = case.build()
    case.save(model, folder)
    tokens = random_tokens(NUM_TOKENS, vocab_size=VOCAB)
    return Subject(case, folder, model, tokens, oracle(model, tokens))


@torch.inference_mode()
def oracle(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def check(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Within 1e-4 of the scale of the logits."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < RELATIVE, f"{what}: logits differ by {error:.2e} of their scale"


def feed(stepper: Stepper, sequence: int, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits of the tokens, fed in chunks of these sizes, then one by one."""
    logits, start = [], 0
    for size in [*sizes, *[1] * (len(tokens) - sum(sizes))]:
        logits += stepper.step([(sequence, tokens[start : start + size])])
        start += size
    return torch.cat(logits)
