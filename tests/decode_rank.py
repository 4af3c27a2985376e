"""One rank that runs plans by hand, with or without recorded steps, on CPU or GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tandem.layers.parallel import SingleRank
from tandem.models.loader import load_model
from tandem.models.registry import load_model_config
from tandem.runner.graphs import CudaRecorder, DecodeGraphs, run_again
from tandem.runner.inputs import InputBuilder
from tandem.runner.memory import Arena, build_arena
from tandem.runner.model_runner import ModelRunner
from tandem.runner.prefill_graphs import PrefillGraphs
from tandem.runner.sampling_table import SamplingTable
from tandem.runner.staging import Staging
from tandem.scheduler.request import SamplingParams
from tandem.scheduler.step import Chunk, NewRequest, StepPlan
from tandem.state.arena import build_geometry
from tandem.state.spec import build_state_spec

PAGE_TOKENS = 8
MAX_ROWS = 6
PAGES_EACH = 8
LENGTHS = {"a": 5, "bb": 17, "ccc": 8, "dddd": 30, "e": 1}
PROMPTS = {
    name: [3 + (7 * i + len(name)) % 500 for i in range(length)] for name, length in LENGTHS.items()
}


class Recorder:
    """Counts what was recorded and how often it ran again."""

    def __init__(self, device: torch.device) -> None:
        self.num_recorded = 0
        self.num_replayed = 0
        self._record = CudaRecorder(device) if device.type == "cuda" else run_again

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        recorded = self._record(work)

        def replay() -> None:
            self.num_replayed += 1
            recorded()

        return replay


class Rank:
    """One runner over an arena in which every byte that nobody wrote is NaN."""

    @torch.inference_mode()
    def __init__(
        self,
        folder: Path,
        buckets: list[int] | None,
        device: torch.device | str = "cpu",
        prefill_buckets: list[int] | None = None,
    ) -> None:
        device = torch.device(device)
        config = load_model_config(folder)
        spec = build_state_spec(config, tp=1, rank=0, page_tokens=PAGE_TOKENS)
        one = build_geometry(
            page_tokens=PAGE_TOKENS,
            page_nbytes=spec.page_nbytes,
            slot_nbytes=spec.slot_nbytes,
            num_slabs=1,
        )
        geometry = replace(one, num_slabs=one.slabs_for(PAGES_EACH * MAX_ROWS, MAX_ROWS))
        self.arena: Arena = build_arena(
            spec, geometry, device, has_padding=bool(buckets or prefill_buckets)
        )
        self.arena.buffer.fill_(0xFF)
        model = load_model(folder, config, SingleRank(), device, show_progress=False)
        staging = Staging(device)
        sampled = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self.recorder = Recorder(device)
        graphs = None
        if buckets is not None:
            assert self.arena.padding is not None
            graphs = DecodeGraphs(
                model,
                self.arena.views,
                padding=self.arena.padding,
                max_rows=MAX_ROWS,
                max_pages=PAGES_EACH,
                vocab_size=config.vocab_size,
                sampled=sampled,
                staging=staging,
                record=self.recorder,
                buckets=buckets,
            )
        prefills = None
        if prefill_buckets:
            assert self.arena.padding is not None
            prefills = PrefillGraphs(
                model,
                self.arena.views,
                padding=self.arena.padding,
                page_tokens=PAGE_TOKENS,
                max_pages=PAGES_EACH,
                vocab_size=config.vocab_size,
                device=device,
                staging=staging,
                record=self.recorder,
                buckets=prefill_buckets,
            )
        sampling = SamplingTable(config.vocab_size, config.eos_token_ids, device)
        inputs = InputBuilder(PAGE_TOKENS, sampling)
        self.runner = ModelRunner(
            model,
            self.arena,
            inputs,
            staging,
            sampling,
            sampled,
            graphs,
            prefill_graphs=prefills,
        )
        self._last_slot = geometry.num_slots - 1

    def slot(self, name: str) -> int:
        return self._last_slot - list(PROMPTS).index(name)

    def pages(self, name: str) -> list[int]:
        first = list(PROMPTS).index(name) * PAGES_EACH
        return list(range(first, first + PAGES_EACH))[::-1]

    def prefill(self, name: str, params: SamplingParams) -> StepPlan:
        prompt = PROMPTS[name]
        new = NewRequest(name, prompt, [], params)
        chunk = Chunk(name, 0, prompt, self.slot(name), 0, self.pages(name), True)
        return StepPlan(0, [], [new], [chunk], 0)

    def decode(self, rows: list[tuple[str, int, int]]) -> StepPlan:
        """Rows of (name, tokens before, token)."""
        chunks = [
            Chunk(name, start, [token], self.slot(name), PAGES_EACH, [], True)
            for name, start, token in rows
        ]
        return StepPlan(0, [], [], chunks, len(chunks))


def run(rank: Rank, params: SamplingParams, num_steps: int) -> list[list[tuple[str, int, object]]]:
    """Sequences join one after another and leave again; every sample of every step."""
    names = list(PROMPTS)
    tokens: dict[str, list[int]] = {}
    log = []
    for step in range(num_steps):
        if step < len(names):
            (sample,) = rank.runner.execute(rank.prefill(names[step], params)).samples
            tokens[names[step]] = [sample.token_id]
        if step > num_steps - 3:
            tokens.pop(names[0], None)
        live = sorted(tokens, key=lambda name: (name[0] != "d", name))
        rows = [(name, len(PROMPTS[name]) + len(tokens[name]) - 1, tokens[name][-1])
                for name in live]  # fmt: skip
        result = rank.runner.execute(rank.decode(rows))
        for sample in result.samples:
            tokens[sample.request_id].append(sample.token_id)
        log.append([(s.request_id, s.token_id, s.logprob) for s in result.samples])
    return log
