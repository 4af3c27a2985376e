"""One rank of one engine: its device, its share of the model, its arena, its transfer agent."""

import os
from dataclasses import replace

import torch
import torch.distributed

from tandem.config.engine import EngineConfig, TransferOptions
from tandem.config.model import ModelConfig
from tandem.errors import EngineDeadError
from tandem.layers.parallel import ProcessGroup, SingleRank, TensorParallel
from tandem.log import get_logger
from tandem.models.loader import Model, load_model
from tandem.models.registry import load_model_config
from tandem.ops import native
from tandem.ops.dispatch import is_native_enabled
from tandem.runner.graphs import CudaRecorder, DecodeGraphs, run_again
from tandem.runner.inputs import InputBuilder
from tandem.runner.memory import Arena, build_arena
from tandem.runner.model_runner import ModelRunner, PendingStep
from tandem.runner.prefill_graphs import PrefillGraphs, bucket_tokens
from tandem.runner.sampling_table import SamplingTable
from tandem.runner.staging import Staging
from tandem.scheduler.scheduler import MAX_RUNNING_PLANS
from tandem.scheduler.step import StepPlan
from tandem.state.arena import ArenaGeometry, build_geometry
from tandem.state.spec import StateSpec, build_state_spec
from tandem.transfer.agent import Operation
from tandem.transfer.layout import PeerInfo, RankInfo, RankLayout
from tandem.transfer.mover import MoveCommand, MoveEvent, RankMover
from tandem.transfer.passive import PassiveRank
from tandem.units import ceil_div, format_nbytes

log = get_logger(__name__)


def model_config(config: EngineConfig) -> ModelConfig:
    """The model's shapes under this engine's dtype settings."""
    options = config.model_options
    model = load_model_config(config.model, dtype=options.dtype, state_dtype=options.state_dtype)
    rounding = options.state_rounding
    if rounding == "auto":
        # fp16 keeps more of a state than bf16, and at random it need not lose small decays.
        rounding = "stochastic" if model.state_dtype == "float16" else "nearest"
    return replace(model, state_rounding=rounding)


def longest_position(config: EngineConfig, model: ModelConfig, geometry: ArenaGeometry) -> int:
    """No token of this engine stands behind it; some models allow millions, for each of which
    rotary tables would hold a row."""
    longest = min(model.max_position, config.scheduler.max_model_len or model.max_position)
    return (
        min(longest, geometry.num_pages * geometry.page_tokens) if geometry.num_pages else longest
    )


def num_threads(config: EngineConfig) -> int:
    """Compute threads of each rank."""
    return config.parallel.threads or max(1, (os.cpu_count() or 1) // config.parallel.tp)


def _graph_rows(config: EngineConfig, device: torch.device) -> list[int] | None:
    """Numbers of rows whose decode steps are recorded; empty: chosen by the most rows. None: none
    is."""
    setting = config.scheduler.decode_graphs
    if setting == "off" or (setting == "auto" and device.type != "cuda"):
        return None
    return [] if setting == "auto" else [int(rows) for rows in setting.split(",")]


def _graph_tokens(config: EngineConfig, device: torch.device) -> list[int]:
    """Numbers of tokens whose prefill steps are recorded; no step is longer than the budget."""
    setting = config.scheduler.prefill_graphs
    budget = config.scheduler.budget_tokens
    if setting == "off" or (setting == "auto" and device.type != "cuda"):
        return []
    if setting == "auto":
        return bucket_tokens(budget)
    return sorted({min(int(tokens), budget) for tokens in setting.split(",")})


def plans_in_flight(config: EngineConfig) -> int:
    """How many plans may run at once: 2 where the host plans a step while the one before runs."""
    setting = config.scheduler.overlap
    is_on = torch.cuda.is_available() if setting == "auto" else setting == "on"
    return MAX_RUNNING_PLANS if is_on else 1


@torch.inference_mode()
def _build_runner(
    config: EngineConfig,
    model: ModelConfig,
    loaded: Model,
    arena: Arena,
    parallel: TensorParallel,
    buckets: list[int] | None,
    prefill_buckets: list[int],
) -> ModelRunner:
    """The runner of one rank. Recording steps takes seconds."""
    device, geometry = arena.buffer.device, arena.geometry
    # As in the engine's sizing: no more rows than slots, no sequence longer than all pages.
    max_rows = config.scheduler.max_num_seqs
    if geometry.num_slots:
        max_rows = min(max_rows, geometry.num_slots)
    length = config.scheduler.max_model_len or model.max_position
    max_pages = max(1, min(ceil_div(length, geometry.page_tokens), geometry.num_pages))
    staging = Staging(device)
    sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)
    record = CudaRecorder(device) if device.type == "cuda" else run_again
    graphs = prefills = None
    if buckets is not None:
        assert arena.padding is not None
        graphs = DecodeGraphs(
            loaded,
            arena.views,
            padding=arena.padding,
            max_rows=max_rows,
            max_pages=max_pages,
            vocab_size=model.vocab_size,
            sampled=sampled,
            staging=staging,
            record=record,
            buckets=sorted({min(rows, max_rows) for rows in buckets}),
        )
    if prefill_buckets:
        assert arena.padding is not None
        prefills = PrefillGraphs(
            loaded,
            arena.views,
            padding=arena.padding,
            page_tokens=geometry.page_tokens,
            max_pages=max_pages,
            vocab_size=model.vocab_size,
            device=device,
            staging=staging,
            record=record,
            buckets=prefill_buckets,
        )
    sampling = None
    if parallel.rank == 0:
        sampling = SamplingTable(model.vocab_size, model.eos_token_ids, device)
    inputs = InputBuilder(geometry.page_tokens, sampling)
    return ModelRunner(
        loaded, arena, inputs, staging, sampling, sampled, graphs, parallel, prefills
    )


class Worker:
    """Executes plans and transfers on one rank. Not thread-safe; transfers progress on a thread of
    their own.

    Args:
        config: the engine's settings.
        rank: of `config.parallel.tp`.
        num_slabs: size of the arena, the same on every rank.
        engine_id: part of the transfer agent's name.
        rendezvous: where ranks meet (torch.distributed init method); needed when tp > 1.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        rank: int,
        num_slabs: int,
        engine_id: str,
        rendezvous: str | None = None,
    ) -> None:
        tp = config.parallel.tp
        torch.set_num_threads(num_threads(config))
        self._device = (
            torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        )
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # Triton launches on the current device
        if self._device.type == "cpu" and is_native_enabled():
            native.load()  # compiles once per machine: no request shall wait for that
        model = model_config(config)
        spec = build_state_spec(model, tp=tp, rank=rank, page_tokens=config.cache.page_tokens)
        geometry = build_geometry(
            page_tokens=spec.page_tokens,
            page_nbytes=spec.page_nbytes,
            slot_nbytes=spec.slot_nbytes,
            num_slabs=num_slabs,
        )
        parallel: TensorParallel = SingleRank()
        if tp > 1:
            assert rendezvous is not None
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            torch.distributed.init_process_group(
                backend, init_method=rendezvous, world_size=tp, rank=rank
            )
            parallel = ProcessGroup()
        self._parallel = parallel
        is_random = config.model_options.load_format == "random"
        model = replace(model, max_position=longest_position(config, model, geometry))
        loaded = load_model(config.model, model, parallel, self._device, is_random=is_random)
        buckets = _graph_rows(config, self._device)
        prefill_buckets = _graph_tokens(config, self._device)
        self._arena: Arena = build_arena(
            spec,
            geometry,
            self._device,
            has_padding=buckets is not None or bool(prefill_buckets),
        )
        log.info(
            "arena of %s: %d slabs, %d pages or %d slots",
            format_nbytes(geometry.arena_nbytes),
            geometry.num_slabs,
            geometry.num_pages,
            geometry.num_slots,
        )
        self.runner = _build_runner(
            config, model, loaded, self._arena, parallel, buckets, prefill_buckets
        )
        self._passive: PassiveRank | None = None
        self._mover: RankMover | None = None
        if config.transfer.role != "colocated":
            specs = [
                build_state_spec(model, tp=tp, rank=other, page_tokens=spec.page_tokens)
                for other in range(tp)
            ]
            self._start_transfer(config.transfer, f"{engine_id}-rank{rank}", specs)

    def _start_transfer(
        self, options: TransferOptions, agent_name: str, specs: list[StateSpec]
    ) -> None:
        # Imported here: an engine without peers needs no NIXL.
        from tandem.transfer.agent_nixl import NixlAgent

        is_cuda = self._device.type == "cuda"
        layout = RankLayout(
            base_address=self._arena.buffer.data_ptr(),
            spec=self._arena.spec,
            geometry=self._arena.geometry,
            memory="VRAM" if is_cuda else "DRAM",
            device_id=(self._device.index or 0) if is_cuda else 0,
        )
        agent = NixlAgent(agent_name)
        # UCX copies in the context of the thread that posts.
        on_start = (lambda: torch.cuda.set_device(self._device)) if is_cuda else None
        if not options.is_mover:
            self._passive = PassiveRank(agent, layout)
        elif options.role == "decode":
            self._mover = RankMover(agent, layout, on_start=on_start)
        else:
            self._mover = RankMover(
                agent, layout, operation=Operation.WRITE, specs=specs, on_start=on_start
            )

    @property
    def rank_info(self) -> RankInfo | None:
        """What peers must know of this rank; None if the engine has none."""
        part = self._passive or self._mover
        return part.info if part is not None else None

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step. Its result waits until the device has written all pages: peers read them
        before a prefill has ended."""
        return self.runner.submit(plan)

    def post_move(self, peer: PeerInfo, command: MoveCommand) -> None:
        """Start a part on the transfer thread, which meets the peer first if it has not."""
        assert self._mover is not None
        self._mover.add_peer(peer)
        self._mover.post(command)

    def give_up_move(self, request_id: str) -> None:
        assert self._mover is not None
        self._mover.give_up(request_id)

    def check(self) -> None:
        """Raises EngineDeadError if transfers cannot move on any more."""
        if self._mover is not None and not self._mover.is_alive:
            raise EngineDeadError("the transfer thread has ended; its trace is on stderr")

    def poll_moves(self) -> list[MoveEvent]:
        self.check()
        return self._mover.poll() if self._mover is not None else []

    def close(self) -> None:
        if self._mover is not None:
            self._mover.close()
        if self._passive is not None:
            self._passive.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
