"""Runs the plan of one step on one rank: inputs, model, sampling."""

import torch

from tandem.models.registry import Model
from tandem.runner.inputs import InputBuilder
from tandem.runner.memory import Arena
from tandem.runner.sampler import sample
from tandem.scheduler.step import Sample, StepPlan, StepResult


class ModelRunner:
    """Executes plans. Every rank computes the same logits; only rank 0 samples.

    Args:
        model: this rank's share of the model.
        arena: this rank's pages and slots.
        inputs: this rank's per-request tables.
        rank: 0 returns samples, others an empty result.
    """

    def __init__(self, model: Model, arena: Arena, inputs: InputBuilder, rank: int) -> None:
        self._model = model
        self._arena = arena
        self._inputs = inputs
        self._rank = rank

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        self._inputs.apply(plan)
        if not plan.chunks:
            return StepResult(plan.step_id, [])
        batch = self._inputs.build(plan.chunks, plan.num_decode, self._arena.views)
        hidden = self._model.forward(batch)
        sampled = [row for row, chunk in enumerate(plan.chunks) if chunk.sample]
        if not sampled:
            return StepResult(plan.step_id, [])
        ends = batch.query_start[1:].long() - 1
        if len(sampled) < len(plan.chunks):
            ends = ends[sampled]
        # The model may hand out a buffer of its own; sampling changes logits in place.
        logits = self._model.logits(hidden[ends]).float()
        if self._rank != 0:
            return StepResult(plan.step_id, [])
        request_ids = [plan.chunks[row].request_id for row in sampled]
        tokens = sample(logits, self._inputs.sampling_states(request_ids))
        samples = []
        for request_id, token in zip(request_ids, tokens, strict=True):
            self._inputs.append(request_id, token.token_id)
            samples.append(Sample(request_id, token.token_id, token.logprob))
        return StepResult(plan.step_id, samples)
