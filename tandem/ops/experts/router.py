"""The router of one layer of experts: product with the gate, scores, choice."""

import torch
import torch.nn.functional as F

from tandem.ops.dispatch import choose, is_native_enabled
from tandem.ops.experts import reference


class Router:
    """Chooses the experts of each token.

    Args:
        gate: fp32 [E, h].    correction_bias: [E] or None.    Others: see `reference.route`.
    """

    def __init__(
        self,
        gate: torch.Tensor,
        correction_bias: torch.Tensor | None,
        top_k: int,
        num_groups: int,
        topk_groups: int,
        normalize: bool,
        scale: float,
        score: str = "sigmoid",
    ) -> None:
        self._gate = gate
        self._bias = correction_bias
        self._choice = (top_k, num_groups, topk_groups, normalize, scale, score)

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, h] → (weights fp32 [T, top_k], ids int64 [T, top_k])."""
        if hidden.is_cuda and is_native_enabled():
            from tandem.ops.experts import router_few_triton, router_many_triton

            for path in (router_few_triton, router_many_triton):
                if path.takes(hidden, self._gate, self._bias):
                    return path.route(hidden, self._gate, self._bias, *self._choice)
        logits = F.linear(hidden.float(), self._gate)
        return choose("experts", reference, logits).route(logits, self._bias, *self._choice)
