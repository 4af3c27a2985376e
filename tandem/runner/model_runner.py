"""Runs the plan of one step on one rank: inputs, model, sampling."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from tandem.layers.parallel import SingleRank, TensorParallel
from tandem.models.loader import Model
from tandem.runner.graphs import DecodeGraphs
from tandem.runner.inputs import HostBatch, InputBuilder, forward_batch
from tandem.runner.memory import Arena
from tandem.runner.prefill_graphs import PrefillGraphs
from tandem.runner.sampler import SampledTokens, sample
from tandem.runner.sampling_table import SamplingPlan, SamplingTable
from tandem.runner.staging import Mark, Staging
from tandem.scheduler.step import Sample, StepPlan, StepResult


@dataclass
class RunnerTimes:
    """Seconds of the host since start: what it does itself, and what it waits for.

    `model_s` is the computation on a CPU, the launches on a GPU.
    """

    num_steps: int = 0
    inputs_s: float = 0.0
    model_s: float = 0.0
    sampling_s: float = 0.0
    wait_s: float = 0.0


class PendingStep:
    """A step whose work is on its way. Its tokens may be inputs of the next step before `result`
    has brought them to the host."""

    def __init__(
        self,
        step_id: int,
        request_ids: list[str],
        sampled: SampledTokens | Mark,
        times: RunnerTimes,
    ) -> None:
        """sampled: tokens of the step, or its end where none is sampled."""
        self._step_id = step_id
        self._request_ids = request_ids
        self._sampled = sampled
        self._times = times

    def result(self) -> StepResult:
        """Waits for the device, whatever the step has sampled: its last write to pages and slots
        lies behind then, and others may read them or take them over."""
        start = time.perf_counter()
        found = self._sampled.wait()
        self._times.wait_s += time.perf_counter() - start
        if found is None:
            return StepResult(self._step_id, [])
        return StepResult(self._step_id, list(map(Sample, self._request_ids, *found)))


class ModelRunner:
    """Executes plans. Every rank computes the same logits; only rank 0 samples.

    Args:
        model: this rank's share of the model.
        arena: this rank's pages and slots.
        inputs: this rank's per-request tables.
        staging: how inputs get to the device.
        sampling: parameters of requests, on the rank that samples; others return empty results.
        sampled: int64 [most rows of a step], where tokens stay for the next step.
        graphs, prefill_graphs: recorded steps; None runs every step launch by launch.
        parallel: the ranks, to which the one that samples tells pending tokens
            (scheduler.step.PENDING_TOKEN).
    """

    def __init__(
        self,
        model: Model,
        arena: Arena,
        inputs: InputBuilder,
        staging: Staging,
        sampling: SamplingTable | None,
        sampled: torch.Tensor,
        graphs: DecodeGraphs | None = None,
        parallel: TensorParallel | None = None,
        prefill_graphs: PrefillGraphs | None = None,
    ) -> None:
        self._model = model
        self._arena = arena
        self._inputs = inputs
        self._staging = staging
        self._sampling = sampling
        self._sampled = sampled
        self._graphs = graphs
        self._prefill_graphs = prefill_graphs
        self._parallel = parallel or SingleRank()
        self._routing: list[torch.Tensor] | None = None
        self.times = RunnerTimes()

    def execute(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).result()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step. On a GPU nothing is waited for."""
        start = time.perf_counter()
        self._inputs.apply(plan)
        if not plan.chunks:
            return self._pending(plan, [], None)
        host = self._inputs.build(plan.chunks, plan.num_decode)
        is_sampled = [chunk.sample for chunk in plan.chunks]
        sampled = [row for row, wanted in enumerate(is_sampled) if wanted]
        is_whole = len(sampled) == len(plan.chunks)
        sampling: SamplingPlan | None = None
        if sampled:
            sampling = self._inputs.plan_sampling(host.rows if is_whole else host.rows[sampled])
        extra = {} if sampling is None else sampling.arrays
        if host.sources is not None:
            self._parallel.broadcast(self._sampled)
        prepared = time.perf_counter()
        greedy = None
        if self._graphs is not None and self._graphs.takes(host) and self._routing is None:
            places = {} if is_whole else {"sampled": np.array(sampled, dtype=np.int64)}
            logits, greedy, given = self._graphs.run(host, extra | places)
            if not is_whole:
                logits, greedy = logits[given["sampled"]], greedy[given["sampled"]]
        elif (
            self._prefill_graphs is not None
            and self._prefill_graphs.takes(host)
            and self._routing is None
        ):
            logits, greedy, given = self._prefill_graphs.run(host, sampled, extra)
        else:
            logits, given = self._run_eager(host, extra, sampled)
        launched = time.perf_counter()
        request_ids: list[str] = []
        tokens: SampledTokens | None = None
        if sampling is not None and self._sampling is not None:
            request_ids = [plan.chunks[row].request_id for row in sampled]
            given = {name: given[name] for name in extra}
            tokens = sample(logits, sampling, given, self._sampling.counts, greedy)
            self._sampled[: len(sampled)].copy_(tokens.tokens)
        times = self.times
        times.num_steps += 1
        times.inputs_s += prepared - start
        times.model_s += launched - prepared
        times.sampling_s += time.perf_counter() - launched
        return self._pending(plan, request_ids, tokens)

    def _pending(
        self, plan: StepPlan, request_ids: list[str], tokens: SampledTokens | None
    ) -> PendingStep:
        end = tokens or Mark(self._sampled.device)
        return PendingStep(plan.step_id, request_ids, end, self.times)

    def _run_eager(
        self, host: HostBatch, extra: Mapping[str, np.ndarray], sampled: list[int]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(logits fp32 of the sampled rows, which sampling may change; `extra` on the device)."""
        arrays = host.arrays() | dict(extra)
        is_every_token = host.num_decode == len(sampled) == host.num_rows
        if not is_every_token:
            arrays["ends"] = host.query_start[1:][sampled].astype(np.int64) - 1
        given = self._staging.send(arrays)
        batch = forward_batch(given, host.num_decode, self._arena.views, self._sampled)
        if self._routing is not None:
            batch = replace(batch, routing=self._routing)
        hidden = self._model.forward(batch)
        if not sampled:
            return hidden, {}
        hidden = hidden if is_every_token else hidden[given["ends"]]
        return self._model.logits(hidden), given

    def record_routing(self, routing: list[torch.Tensor] | None) -> None:
        """From now on each layer of experts appends the choices of its tokens, int64 [T, k]; None
        ends it. Such steps are not replayed from graphs."""
        self._routing = routing
