"""Tandem: serving of models that mix recurrent layers with attention, prefill and decode apart."""

from typing import TYPE_CHECKING, Any

from tandem.scheduler.request import SamplingParams

if TYPE_CHECKING:
    from tandem.engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # LLM brings torch, which a router or a client of this package does not need.
    if name == "LLM":
        from tandem.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'tandem' has no attribute {name!r}")
