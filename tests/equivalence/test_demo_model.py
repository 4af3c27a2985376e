"""The model that ships is what its card says, on one engine and with prefill and decode apart.

It was trained until it recalls what it was told, so that state which is lost, mixed up or damaged
on its way from prefill to decode costs answers and perplexity; the last tests show that it does.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.config.args import build_config
from tandem.engine.engine import EngineCore
from tandem.engine.tokenizer import Tokenizer
from tandem.runner.memory import Arena
from tandem.scheduler.request import EngineRequest, SamplingParams, TokenDelta
from tandem.state.ticket import Ticket
from tandem.transfer.agent import TransferAgent
from tandem.transfer.agent_local import LocalAgent, LocalFabric
from tandem.transfer.agent_nixl import NixlAgent
from tandem.transfer.identity import current_process
from tandem.transfer.layout import PeerInfo, RankLayout
from tandem.transfer.mover import RankMover
from tandem.transfer.passive import PassiveRank
from tandem.transfer.plan import Placement
from tandem.transfer.protocol import MoveCommand
from tests.stepper import Stepper

FOLDER = Path(str(files("tandem") / "demo_model"))
HELD_OUT = json.loads((FOLDER / "held_out.json").read_text())
TOKENIZER = Tokenizer.load(FOLDER)
TEXTS = [TOKENIZER.encode(item["text"]) for item in HELD_OUT["texts"]]
RECALL = HELD_OUT["recall"]
PROMPTS = [TOKENIZER.encode(item["prompt"]) for item in RECALL]
ANSWERS = [TOKENIZER.encode(item["answer"]) for item in RECALL]

# What the card claims, with margins.
MIN_RECALL = 38  # of 40; 40 when it was trained
MAX_PERPLEXITY = {"novels": 56.0, "bible": 17.0}  # of held_out.json's texts: 52.8, 15.3
# Stored values have five decimals and come from another implementation, in fp32.
NLL_RELATIVE = 1e-4
# Of one token, when equal state is computed in other batches and over other pages, in fp32.
MAX_NLL_DIFFERENCE = 1e-4


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stepper(dtype: str = "float32", **options: Any) -> "Engine":
    longest = max(map(len, TEXTS))
    return Engine(FOLDER, max_tokens=longest, num_sequences=len(TEXTS), dtype=dtype, **options)


def token_nll(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Of tokens 1.. given those before them; logits [T, vocab] of tokens [T]."""
    targets = torch.tensor(tokens[1:])
    return torch.nn.functional.cross_entropy(logits[:-1].double(), targets, reduction="none")


# --- the checkpoint ---


def test_the_held_out_file_is_what_the_card_says() -> None:
    assert len(RECALL) == 40
    assert {item["kind"] for item in RECALL} == {"statement", "question"}
    assert {item["source"] for item in HELD_OUT["texts"]} == set(MAX_PERPLEXITY)
    for tokens, item in zip(TEXTS, HELD_OUT["texts"], strict=True):
        assert len(tokens) == item["num_tokens"]
    for item in RECALL:
        assert item["code"] in item["answer"]
        assert item["code"] in item["prompt"]
    # Far enough apart that the fact is pages and many chunks of the scan away.
    assert max(item["distance_tokens"] for item in RECALL) > 500


@pytest.mark.parametrize(("dtype", "relative"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_logits_equal_those_of_transformers(dtype: str, relative: float) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()
    ours = stepper(dtype)
    for tokens in (TEXTS[0], TEXTS[-1], PROMPTS[0]):
        ours.forget(0)
        (actual,) = ours.step([(0, tokens)])
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens]), use_cache=False).logits[0].double()
        error = (actual.double() - expected).abs().max() / expected.abs().max()
        assert error < relative


@pytest.mark.parametrize(("dtype", "relative"), [("float32", NLL_RELATIVE), ("bfloat16", 5e-3)])
def test_perplexity_of_held_out_text(dtype: str, relative: float) -> None:
    nll: dict[str, list[float]] = {source: [] for source in MAX_PERPLEXITY}
    logits = stepper(dtype).step(list(enumerate(TEXTS)))
    for tokens, item, rows in zip(TEXTS, HELD_OUT["texts"], logits, strict=True):
        actual = token_nll(rows, tokens).mean().item()
        assert actual == pytest.approx(item["nll_per_token"], rel=relative)
        nll[item["source"]].append(actual)
    for source, values in nll.items():
        assert torch.tensor(values).mean().exp() < MAX_PERPLEXITY[source]


# --- state moved between arenas by the transfer plane, tokens fed by hand ---


class Engine(Stepper):
    """A stepper whose state can be read by another one."""

    @property
    def arenas(self) -> list[Arena]:
        """By rank."""
        return [arena for _, arena in self._ranks]

    @property
    def layouts(self) -> list[RankLayout]:
        return [
            RankLayout(arena.buffer.data_ptr(), arena.spec, arena.geometry) for arena in self.arenas
        ]

    def place(self, sequence: int) -> Placement:
        return Placement(self._pages[sequence].tolist(), int(self._slots[sequence]))

    def resume(self, sequence: int, num_tokens: int) -> None:
        """The sequence's memory holds the state after `num_tokens` tokens."""
        self._num_computed[sequence] = num_tokens


def move(
    src: Engine,
    dst: Engine,
    num_tokens: Sequence[int],
    make_agent: Callable[[str], TransferAgent],
) -> None:
    """Read sequences 0.. of `src` into `dst`, every destination rank its share."""
    sources = [PassiveRank(make_agent(f"P{rank}"), it) for rank, it in enumerate(src.layouts)]
    ranks = tuple(source.info for source in sources)
    peer = PeerInfo("P", "g1", "tcp://127.0.0.1:1", current_process(), ranks)
    for rank, layout in enumerate(dst.layouts):
        reader = RankMover(make_agent(f"D{rank}"), layout)
        reader.add_peer(peer)
        for sequence, count in enumerate(num_tokens):
            here, there = src.place(sequence), dst.place(sequence)
            reader.post(
                MoveCommand(
                    request_id=str(sequence),
                    peer=peer.key,
                    part=0,
                    start_token=0,
                    stop_token=count,
                    src_pages=tuple(here.pages),
                    src_slot=here.slot,
                    dst_pages=tuple(there.pages),
                    dst_slot=there.slot,
                )
            )
        events = []
        deadline = time.monotonic() + 30
        while len(events) < len(num_tokens) and time.monotonic() < deadline:
            events += reader.poll()
            time.sleep(0.001)
        reader.close()
        assert [event.error for event in events] == [None] * len(num_tokens)
    for source in sources:
        source.close()
    for sequence, count in enumerate(num_tokens):
        dst.resume(sequence, count)


def local_agents() -> Callable[[str], TransferAgent]:
    fabric = LocalFabric()
    return lambda role: LocalAgent(fabric, role)


HALVES = [len(tokens) // 2 - index for index, tokens in enumerate(TEXTS)]  # at all places of a page
NUM_DECODED = 40  # tokens of the second half that are fed one by one, the rest as one chunk


def first_half(engine: Engine) -> list[torch.Tensor]:
    return engine.step([(i, tokens[: HALVES[i]]) for i, tokens in enumerate(TEXTS)])


def second_half(engine: Engine) -> list[torch.Tensor]:
    """Logits [T, vocab] of each text's tokens from HALVES on."""
    parts: list[list[torch.Tensor]] = [[] for _ in TEXTS]
    starts = list(HALVES)
    for length in [1] * NUM_DECODED + [max(map(len, TEXTS))]:
        rows = [
            (i, tokens[start : start + length])
            for i, (tokens, start) in enumerate(zip(TEXTS, starts, strict=True))
        ]
        for i, logits in enumerate(engine.step(rows)):
            parts[i].append(logits)
            starts[i] += len(logits)
    return [torch.cat(part) for part in parts]


@dataclass
class Colocated:
    """Logits of the halves of all texts, on one engine."""

    first: list[torch.Tensor]
    second: list[torch.Tensor]


@pytest.fixture(scope="module")
def colocated() -> Colocated:
    engine = stepper()
    return Colocated(first_half(engine), second_half(engine))


@pytest.mark.parametrize(
    ("make_agents", "p", "d"),
    [
        (local_agents, {"tp": 1, "page_tokens": 16}, {"tp": 1, "page_tokens": 16}),
        (local_agents, {"tp": 2, "page_tokens": 16}, {"tp": 1, "page_tokens": 32}),
        (local_agents, {"tp": 1, "page_tokens": 32}, {"tp": 4, "page_tokens": 8}),
        pytest.param(
            lambda: NixlAgent,
            {"tp": 1, "page_tokens": 16},
            {"tp": 2, "page_tokens": 16},
            marks=pytest.mark.nixl,
        ),
    ],
    ids=["equal", "tp 2 to 1", "tp 1 to 4", "tp 1 to 2 over NIXL"],
)
def test_perplexity_is_the_same_when_the_state_has_moved(
    colocated: Colocated,
    make_agents: Callable[[], Callable[[str], TransferAgent]],
    p: dict[str, int],
    d: dict[str, int],
) -> None:
    source, target = stepper(**p), stepper(**d)
    first = first_half(source)
    move(source, target, HALVES, make_agents())
    second = second_half(target)
    for index, (tokens, item) in enumerate(zip(TEXTS, HELD_OUT["texts"], strict=True)):
        moved = token_nll(torch.cat([first[index], second[index]]), tokens)
        stayed = token_nll(torch.cat([colocated.first[index], colocated.second[index]]), tokens)
        assert (moved - stayed).abs().max() < MAX_NLL_DIFFERENCE
        assert moved.mean().item() == pytest.approx(item["nll_per_token"], rel=NLL_RELATIVE)


# --- through engines ---

ENGINE = {"arena_mib": 64, "max_num_seqs": 16, "max_model_len": 1024, "budget_tokens": 512}
BATCH = 8


def build_core(**settings: Any) -> EngineCore:
    return EngineCore(build_config(str(FOLDER), {**ENGINE, "threads": 1, **settings}))


@dataclass
class Pair:
    p: EngineCore
    d: EngineCore


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """A prefill and a decode engine with unequal pages, over NIXL."""
    p = build_core(role="prefill", page_tokens=16)
    d = build_core(role="decode", page_tokens=32)
    yield Pair(p, d)
    d.close()
    p.close()


def request(index: int, **fields: Any) -> EngineRequest:
    """Prompt `index` with as many tokens as its answer has and some more."""
    sampling = SamplingParams(temperature=0, max_tokens=len(ANSWERS[index]) + 8, ignore_eos=True)
    return EngineRequest(
        request_id=f"recall-{index}",
        prompt_token_ids=PROMPTS[index],
        sampling=sampling,
        **fields,
    )


def run(core: EngineCore, requests: Sequence[EngineRequest]) -> list[list[TokenDelta]]:
    """What each request produced, in the order of `requests`."""
    deltas: dict[str, list[TokenDelta]] = {item.request_id: [] for item in requests}
    for item in requests:
        core.add(item)
    left, deadline = len(requests), time.monotonic() + 60
    while left and time.monotonic() < deadline:
        for delta in core.step():
            deltas[delta.request_id].append(delta)
            left -= delta.finish_reason is not None
        if not core.has_work():
            time.sleep(0.001)
    assert not left, f"{left} requests did not end"
    return list(deltas.values())


def token_ids(deltas: Sequence[TokenDelta]) -> list[int]:
    assert deltas[-1].finish_reason == "length"
    return [token for delta in deltas for token in delta.token_ids]


def wait_until_idle(core: EngineCore) -> None:
    deadline = time.monotonic() + 10
    while not core.stats()["is_idle"] and time.monotonic() < deadline:
        core.step()
        time.sleep(0.002)
    assert core.stats()["is_idle"], core.stats()


def run_apart(
    pair: Pair,
    indices: Sequence[int],
    tamper: Callable[[list[Ticket]], None] = lambda tickets: None,
) -> list[list[int]]:
    """Answers of prompts that P computes and D continues; `tamper` sees what P holds for each."""
    answers: list[list[int]] = []
    pair.d.flush_prefix_cache()  # all of it shall come over the wire
    for start in range(0, len(indices), BATCH):
        batch = indices[start : start + BATCH]
        held = run(pair.p, [request(index, hold=True) for index in batch])
        tickets = [deltas[-1].ticket for deltas in held]
        tamper([ticket for ticket in tickets if ticket is not None])
        requests = [
            request(index, ticket=ticket) for index, ticket in zip(batch, tickets, strict=True)
        ]
        answers += map(token_ids, run(pair.d, requests))
        wait_until_idle(pair.p)
        wait_until_idle(pair.d)
    return answers


def num_right(indices: Sequence[int], outputs: Sequence[Sequence[int]]) -> int:
    return sum(
        TOKENIZER.decode(output).startswith(RECALL[index]["answer"])
        for index, output in zip(indices, outputs, strict=True)
    )


@pytest.mark.nixl
def test_recall_on_one_engine_and_apart(pair: Pair) -> None:
    indices = range(len(RECALL))
    core = build_core()
    together = [token_ids(deltas) for deltas in run(core, [request(index) for index in indices])]
    wait_until_idle(core)
    core.close()
    assert num_right(indices, together) >= MIN_RECALL
    before = pair.d.stats()
    apart = run_apart(pair, indices)
    after = pair.d.stats()
    assert apart == together
    assert num_right(indices, apart) >= MIN_RECALL
    # Nothing was recomputed on D: all of it came over the wire.
    assert after["transfer_num_done"] - before["transfer_num_done"] == len(RECALL)
    assert after["failed_reads_total"] == before["failed_reads_total"]
    assert after["prompt_tokens_total"] == before["prompt_tokens_total"]


# --- the tests above can fail ---


@pytest.mark.nixl
@pytest.mark.parametrize("part", ["slot", "pages"])
def test_the_state_of_another_request_costs_the_answers(pair: Pair, part: str) -> None:
    arena = pair.p._executor._worker._arena  # type: ignore[attr-defined]
    geometry = arena.geometry
    slots = arena.buffer[: geometry.num_slots * geometry.slot_stride].view(geometry.num_slots, -1)
    pages = arena.buffer[: geometry.num_pages * geometry.page_nbytes].view(geometry.num_pages, -1)

    def exchange(tickets: list[Ticket]) -> None:
        """In P's memory, each prompt's state becomes that of the next one."""
        before = arena.buffer.clone()
        for mine, other in zip(tickets, tickets[1:] + tickets[:1], strict=True):
            if part == "slot":
                slots[mine.slot] = before[: slots.numel()].view_as(slots)[other.slot]
                continue
            for k, page in enumerate(mine.pages):
                source = other.pages[k % len(other.pages)]
                pages[page] = before[: pages.numel()].view_as(pages)[source]

    # Short prompts: what is exchanged is most of what the answer depends on.
    indices = [index for index in range(len(RECALL)) if RECALL[index]["distance_tokens"] < 100]
    before = pair.d.stats()["transfer_num_done"]
    assert num_right(indices, run_apart(pair, indices, exchange)) < len(indices) / 2
    assert pair.d.stats()["transfer_num_done"] - before == len(indices)


def test_64_damaged_bytes_of_any_component_change_the_perplexity(colocated: Colocated) -> None:
    source, target = stepper(page_tokens=16), stepper(page_tokens=16)
    first_half(source)
    move(source, target, HALVES, local_agents())
    tokens, half = TEXTS[0], HALVES[0]
    intact = token_nll(torch.cat([colocated.first[0], colocated.second[0]]), tokens)

    def difference() -> float:
        target.resume(0, half)
        (second,) = target.step([(0, tokens[half:])])
        return float(
            (token_nll(torch.cat([colocated.first[0], second]), tokens) - intact).abs().max()
        )

    (arena,) = target.arenas
    kept = arena.buffer.clone()
    assert difference() < MAX_NLL_DIFFERENCE
    place, geometry = target.place(0), arena.geometry
    page_start = place.pages[half // 16 // 2] * geometry.page_nbytes
    slot_start = (place.slot or 0) * geometry.slot_stride
    places = [("page", page_start, it) for it in arena.spec.page]
    places += [("slot", slot_start, it) for it in arena.spec.slot]
    assert len(places) == 2 + 7 * 4
    for part, start, item in places:
        arena.buffer.copy_(kept)
        start += item.offset
        assert arena.buffer[start : start + 64].any()
        arena.buffer[start : start + 64] = 0
        assert difference() > 2 * MAX_NLL_DIFFERENCE, f"{part}, layer {item.layer}, {item.name}"
