"""The one table of numeric tolerances, by dtype of the result, and the comparison that uses it."""

import torch

# Relative error allowed to a result that is rounded once from fp32 arithmetic (bf16, fp16: 2 ulp).
TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """Compare with an expectation in float64.

    The tolerance is that of `dtype`, by default of `actual`; relative to each element, and absolute
    on the scale of the largest expected one, since sums cancel.
    """
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if not expected.numel():
        return
    limit = TOLERANCE[dtype or actual.dtype]
    scale = max(1.0, expected.detach().double().abs().max().item())
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=limit, atol=limit * scale, check_device=False
    )
