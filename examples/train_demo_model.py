"""Train the model that `tandem demo` serves and write it as an HF folder.

    python examples/train_demo_model.py prepare --work build/demo     # text, tokenizer
    python examples/train_demo_model.py train --work build/demo --out build/demo/model
    python examples/train_demo_model.py finish --work build/demo --out build/demo/model

`train --device cpu --steps 20 --rows 4` is a smoke test.
The defaults are those of the shipped model; see its card for what they lead to.

`prepare` needs apt-get and dpkg; `train` needs only what `prepare` wrote, and a GPU for minutes.
See demo_data.py for the data and demo_model.py for the model.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from demo_data import (
    AUSTEN_PACKAGE,
    BIBLE_PACKAGES,
    Corpus,
    Piece,
    TaskMaker,
    fetch_text,
    split_held_out,
)
from demo_model import CONFIG, DemoModel
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F

SPECIAL = ("<pad>", "<s>", "</s>")
MAX_SHARD_NBYTES = 12 * 2**20
DISTANCES = (10, 50, 100, 200, 400, 800)  # bounds of the recall buckets, in tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] in ('system', 'developer') %}{{ message['content'] + '\\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\\nAnswer:' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token + '\\n' }}"
    "{% else %}{{ raise_exception('role ' + message['role'] + ' is not supported') }}"
    "{% endif %}{% endfor %}"
)


def prepare(work: Path) -> None:
    """Write corpus.json (split text and checksums) and tokenizer.json into `work`."""
    corpus, checksums = fetch_text(work / "packages")
    train, held_out = split_held_out(corpus)
    tokenizer = Tokenizer(models.BPE())
    # Digits apart: a code of four digits is always four tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    maker = TaskMaker(train, seed=1)
    tasks = [
        "".join(p.text for p in maker.row(2000) if not p.text.startswith("<")) for _ in range(300)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator([*train.novels, *train.bible, *tasks], trainer)
    tokenizer.save(str(work / "tokenizer.json"))
    data = {
        "checksums": checksums,
        "train": {"novels": train.novels, "bible": train.bible},
        "held_out": {"novels": held_out.novels, "bible": held_out.bible},
    }
    (work / "corpus.json").write_text(json.dumps(data))
    print(f"{tokenizer.get_vocab_size()} tokens in the vocabulary; wrote {work}")


def load_prepared(work: Path) -> tuple[Corpus, Corpus, dict[str, str], Tokenizer]:
    data = json.loads((work / "corpus.json").read_text())
    train, held_out = (
        Corpus(tuple(data[part]["novels"]), tuple(data[part]["bible"]))
        for part in ("train", "held_out")
    )
    return train, held_out, data["checksums"], Tokenizer.from_file(str(work / "tokenizer.json"))


def encode_pieces(tokenizer: Tokenizer, pieces: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, loss weight of each): a token has the weight of the piece it starts in."""
    starts = np.cumsum([0, *(len(piece.text) for piece in pieces)])
    encoding = tokenizer.encode("".join(piece.text for piece in pieces))
    begin = np.array([span[0] for span in encoding.offsets])
    owner = np.searchsorted(starts, begin, side="right") - 1
    weights = np.array([piece.weight for piece in pieces], dtype=np.float32)
    return np.array(encoding.ids, dtype=np.int64), weights[owner]


class Rows(torch.utils.data.IterableDataset):
    """Endless batches (tokens [rows, length + 1], weights [rows, length + 1]) of text and tasks."""

    def __init__(self, work: Path, rows: int, length: int, text_share: float, seed: int) -> None:
        self.work, self.rows, self.length = work, rows, length
        self.text_share, self.seed = text_share, seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        seed = self.seed * 1000 + (worker.id if worker else 0)
        train, _, _, tokenizer = load_prepared(self.work)
        maker = TaskMaker(train, seed)
        rng = np.random.default_rng(seed)
        # The novels are read twice as often as the Bible.
        texts = [f"{text}</s>" for text in (*train.novels, *train.bible)]
        encoded = [np.array(e.ids, dtype=np.int64) for e in tokenizer.encode_batch(texts)]
        novels, bible = encoded[: len(train.novels)], encoded[len(train.novels) :]
        width = self.length + 1
        while True:
            tokens = np.empty((self.rows, width), dtype=np.int64)
            weights = np.ones((self.rows, width), dtype=np.float32)
            for row in range(self.rows):
                if rng.random() < self.text_share:
                    tokens[row] = self._text_row(rng, novels if rng.random() < 0.67 else bible)
                    continue
                ids = np.empty(0, dtype=np.int64)
                while len(ids) < width:
                    ids, scale = encode_pieces(tokenizer, maker.row(5 * width))
                tokens[row], weights[row] = ids[:width], scale[:width]
            yield torch.from_numpy(tokens), torch.from_numpy(weights)

    def _text_row(self, rng: np.random.Generator, chapters: list[np.ndarray]) -> np.ndarray:
        """Text from a random place of a random chapter on, cut to length."""
        index = int(rng.integers(len(chapters)))
        parts = [chapters[index][int(rng.integers(len(chapters[index]))) :]]
        if rng.random() < 0.3:
            parts = [np.array([CONFIG["bos_token_id"]]), chapters[index]]
        while sum(map(len, parts)) < self.length + 1:
            index = (index + 1) % len(chapters)
            parts.append(chapters[index])
        return np.concatenate(parts)[: self.length + 1]


def weighted_loss(model: DemoModel, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    losses = F.cross_entropy(logits.float(), tokens[:, 1:].flatten(), reduction="none")
    scale = weights[:, 1:].flatten()
    return (losses * scale).sum() / scale.sum()


def make_optimizer(model: DemoModel, peak: float, decay: float) -> torch.optim.Optimizer:
    """AdamW; no decay on norms, biases and the recurrence's own parameters."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    fused = matrices[0].is_cuda
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), eps=1e-8, fused=fused)


def train(args: argparse.Namespace) -> None:
    started = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    _, held_out, checksums, tokenizer = load_prepared(args.work)
    model = DemoModel(dropout=args.dropout).to(device)
    num_parameters = sum(p.numel() for p in model.parameters())
    optimizer = make_optimizer(model, args.lr, args.weight_decay)
    loss_of = weighted_loss
    if device.type == "cuda" if args.compile is None else args.compile:
        for layer in model.backbone.layers:
            layer.compile()
        loss_of = torch.compile(weighted_loss)
    loader = torch.utils.data.DataLoader(
        Rows(args.work, args.rows, args.length, args.text_share, args.seed),
        batch_size=None, num_workers=args.workers, pin_memory=device.type == "cuda",
        prefetch_factor=4 if args.workers else None,
    )  # fmt: skip
    print(
        f"{num_parameters / 1e6:.2f} M parameters, {args.rows} x {args.length} tokens a step",
        flush=True,
    )
    step, progress, window, last = 0, 0.0, [], started
    for tokens, weights in loader:
        # Steps or minutes, whichever ends first; the schedule follows the one that is further.
        progress = max(step / args.steps, (time.monotonic() - started) / (60 * args.minutes))
        if progress >= 1:
            break
        rate = args.lr * min(1.0, (step + 1) / args.warmup)
        rate *= 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens, weights = (
            tokens.to(device, non_blocking=True),
            weights.to(device, non_blocking=True),
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, tokens, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        window.append(loss.detach())
        step += 1
        if step % args.log_every == 0:
            mean = torch.stack(window).mean().item()
            now = time.monotonic()
            ms = 1000 * (now - last) / len(window)
            print(
                f"step {step}  {100 * progress:3.0f} %  loss {mean:.3f}  {ms:.0f} ms/step",
                flush=True,
            )
            window, last = [], now
        if step % args.eval_every == 0:
            model.eval()
            # Odd shapes and eval mode would each cost a compilation.
            with torch.compiler.set_stance("force_eager"):
                found = measure(model, tokenizer, held_out, device, num_items=16)
            print(f"  held out: {json.dumps(found)}", flush=True)
            model.train()
    metrics = {
        "parameters": num_parameters, "steps": step, "tokens": step * args.rows * args.length,
        "training_seconds": round(time.monotonic() - started), "device": device.type,
        "checksums": checksums,
    }  # fmt: skip
    write_folder(model, tokenizer, metrics, args.out)


def finish(args: argparse.Namespace) -> None:
    """Calibrate what `train` wrote, measure it as it ships, write held_out.json and the card."""
    _, held_out, _, tokenizer = load_prepared(args.work)
    metrics = json.loads((args.out / "metrics.json").read_text())
    device = torch.device(args.device)
    model = load_folder(args.out).to(device)
    scale = calibrate(model, tokenizer, held_out, device)
    model.backbone.norm_f.weight.data.mul_(scale)
    # What ships is bf16, so that is what is measured.
    model.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    metrics["logit_scale"] = round(metrics.get("logit_scale", 1.0) * scale, 3)
    metrics |= measure(model, tokenizer, held_out, device, args.eval_items)
    write_folder(model, tokenizer, metrics, args.out)
    write_held_out(model.cpu(), tokenizer, held_out, args.out)
    (args.out / "README.md").write_text(card(metrics, args.eval_items))
    print(json.dumps(metrics, indent=1))


@torch.no_grad()
def calibrate(
    model: DemoModel, tokenizer: Tokenizer, held_out: Corpus, device: torch.device
) -> float:
    """The factor on the logits with the least loss on the even held-out windows.

    A small text read dozens of times leaves a model too sure of itself; one factor undoes much of
    that and leaves greedy decoding as it is (temperature scaling: Guo et al. 2017,
    arXiv:1706.04599).
    """
    factors = [0.4 + 0.05 * i for i in range(17)]  # 0.4 to 1.2
    totals = torch.zeros(len(factors))
    for part in ("novels", "bible"):
        for row in held_out_windows(tokenizer, held_out, part)[::2]:
            tokens = torch.from_numpy(row).to(device)
            logits = model(tokens[None, :-1])[0]
            totals += torch.stack(
                [F.cross_entropy(logits * factor, tokens[1:]) for factor in factors]
            ).cpu()
    return factors[int(totals.argmin())]


def held_out_windows(tokenizer: Tokenizer, held_out: Corpus, part: str) -> np.ndarray:
    """int64 [windows, 1025]; neighbours share one token."""
    chapters = [tokenizer.encode(f"{text}</s>").ids for text in getattr(held_out, part)]
    stream = np.concatenate(chapters).astype(np.int64)
    count = (len(stream) - 1) // 1024
    return np.stack([stream[i * 1024 : i * 1024 + 1025] for i in range(count)])


@torch.no_grad()
def measure(
    model: DemoModel, tokenizer: Tokenizer, held_out: Corpus, device: torch.device, num_items: int
) -> dict:
    """Perplexity per token on held-out windows of 1024 tokens; share of right answers by distance.

    Windows are the odd ones: `calibrate` has seen the even ones.
    """
    result: dict = {"perplexity": {}, "recall": {}}
    for part in ("novels", "bible"):
        rows = held_out_windows(tokenizer, held_out, part)[1::2]
        total = sum(
            weighted_loss(model, t, torch.ones_like(t, dtype=torch.float32)).item() * len(t)
            for t in torch.from_numpy(rows).to(device).split(16)
        )
        result["perplexity"][part] = round(math.exp(total / len(rows)), 2)
    for kind, items in recall_items(tokenizer, held_out, num_items, seed=77).items():
        scores = recalled(model, tokenizer, items, device)
        bounds = list(itertools.pairwise(DISTANCES))
        buckets = {f"{low}-{high}": [] for low, high in bounds}
        for item, is_right in zip(items, scores, strict=True):
            for low, high in bounds:
                if low <= item["distance_tokens"] < high:
                    buckets[f"{low}-{high}"].append(is_right)
        result["recall"][kind] = {k: round(sum(v) / len(v), 4) for k, v in buckets.items() if v}
    return result


def recall_items(
    tokenizer: Tokenizer, held_out: Corpus, num_items: int, seed: int
) -> dict[str, list[dict]]:
    """`num_items` a bucket and kind; distance is from the code to the prompt's end."""
    maker = TaskMaker(held_out, seed)
    found: dict[str, list[dict]] = {"statement": [], "question": []}
    for kind, items in found.items():
        for low, high in itertools.pairwise(DISTANCES):
            have = 0
            while have < num_items:
                num_facts = maker.rng.randint(1, 6 if high > 100 else 3)
                chars = int(maker.rng.uniform(low, high) * 3.6)
                prompt, answer, value = maker.recall_item(chars, num_facts, kind == "question")
                said = prompt.index(f" is {value}.") + len(f" is {value}")
                distance = len(tokenizer.encode(prompt[said:]).ids)
                if low <= distance < high and len(tokenizer.encode(prompt).ids) < 1000:
                    items.append({"kind": kind, "prompt": prompt, "answer": answer,
                                  "code": value, "distance_tokens": distance})  # fmt: skip
                    have += 1
    return found


@torch.no_grad()
def recalled(
    model: DemoModel, tokenizer: Tokenizer, items: list[dict], device: torch.device
) -> list[bool]:
    """Whether greedy decoding gives the answer: each token the likeliest after those before it."""
    right = []
    for start in range(0, len(items), 16):
        group = items[start : start + 16]
        prompts = [tokenizer.encode(item["prompt"]).ids for item in group]
        wholes = [tokenizer.encode(item["prompt"] + item["answer"]).ids for item in group]
        length = max(map(len, wholes))
        # Padding at the end changes nothing before it: the model is causal.
        rows = torch.tensor([ids + [0] * (length - len(ids)) for ids in wholes], device=device)
        best = model(rows).argmax(-1).cpu()
        for prompt, ids, likely in zip(prompts, wholes, best, strict=True):
            right.append(likely[len(prompt) - 1 : len(ids) - 1].tolist() == ids[len(prompt) :])
    return right


def write_folder(model: DemoModel, tokenizer: Tokenizer, metrics: dict, out: Path) -> None:
    """An HF folder: bf16 safetensors in shards with an index, config, tokenizer, chat template."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()
    }
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > MAX_SHARD_NBYTES:
            shards.append({})
        shards[-1][name] = tensor
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, out / name, metadata={"format": "pt"})
        (out / name).chmod(0o644)  # written for the owner alone; a package's data is for all
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {k: n for n, shard in zip(names, shards, strict=True) for k in shard},
    }
    tokenizer.save(str(out / "tokenizer.json"))
    files = {
        "model.safetensors.index.json": index,
        "config.json": CONFIG,
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[2],
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
        "metrics.json": metrics,
    }  # fmt: skip
    for name, value in files.items():
        (out / name).write_text(json.dumps(value, indent=2) + "\n")


@torch.no_grad()
def write_held_out(model: DemoModel, tokenizer: Tokenizer, held_out: Corpus, out: Path) -> None:
    """A few held-out texts and recall items for tests; the model card states the schema."""
    texts = []
    for source, chapters in (("novels", held_out.novels[:6]), ("bible", held_out.bible[:12:4])):
        for chapter in chapters:
            ids = tokenizer.encode(chapter).ids[:384]
            text = tokenizer.decode(ids)
            row = torch.tensor([tokenizer.encode(text).ids])
            nll = weighted_loss(model, row, torch.ones_like(row, dtype=torch.float32)).item()
            texts.append({"source": source, "text": text, "num_tokens": row.shape[1],
                          "nll_per_token": round(nll, 5)})  # fmt: skip
    items = recall_items(tokenizer, held_out, num_items=4, seed=5)
    data = {"texts": texts, "recall": [item for found in items.values() for item in found]}
    (out / "held_out.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def load_folder(folder: Path) -> DemoModel:
    """The model of an HF folder, fp32, eval."""
    model = DemoModel()
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        weights |= load_file(shard)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model.eval()


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    one = steps.add_parser("prepare", help="download text, train the tokenizer")
    one.add_argument("--work", type=Path, required=True)
    two = steps.add_parser("train", help="train, measure, write the HF folder")
    two.add_argument("--work", type=Path, required=True)
    two.add_argument("--out", type=Path, required=True)
    two.add_argument("--device", default="cuda")
    two.add_argument("--steps", type=int, default=4200)
    two.add_argument("--minutes", type=float, default=7.5, help="time limit of the training loop")
    two.add_argument("--rows", type=int, default=64)
    two.add_argument("--length", type=int, default=1024)
    two.add_argument("--lr", type=float, default=2.5e-3)
    two.add_argument("--warmup", type=int, default=150)
    two.add_argument("--weight-decay", type=float, default=0.1)
    two.add_argument("--dropout", type=float, default=0.12)
    two.add_argument("--text-share", type=float, default=0.3)
    two.add_argument("--workers", type=int, default=12)
    two.add_argument("--seed", type=int, default=0)
    two.add_argument("--log-every", type=int, default=100)
    two.add_argument("--eval-every", type=int, default=700)
    two.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    three = steps.add_parser("finish", help="calibrate, measure, write held-out items and the card")
    three.add_argument("--work", type=Path, required=True)
    three.add_argument("--out", type=Path, required=True)
    three.add_argument("--device", default="cpu")
    three.add_argument(
        "--eval-items", type=int, default=100, help="recall prompts a bucket and kind"
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args = parse_args(argv)
    if args.step == "prepare":
        prepare(args.work)
    elif args.step == "train":
        train(args)
    else:
        finish(args)


def card(metrics: dict, eval_items: int) -> str:
    """The model card, in Markdown."""
    template = Path(__file__).with_name("demo_card.md").read_text()
    recall = metrics["recall"]
    buckets = list(recall["statement"])
    pattern = CONFIG["hybrid_override_pattern"]
    return template.format(
        **{key: value for key, value in CONFIG.items() if isinstance(value, int)},
        scale=metrics["logit_scale"], parameters=f"{metrics['parameters'] / 1e6:.1f} M",
        pattern=pattern, mamba=pattern.count("M"), attention=pattern.count("*"),
        mlp=pattern.count("-"),
        austen=AUSTEN_PACKAGE, bible="`, `".join(BIBLE_PACKAGES),
        checksums=", ".join(f"{name} `{value}`" for name, value in metrics["checksums"].items()),
        steps=metrics["steps"], tokens=metrics["tokens"] // 10**6,
        training_seconds=metrics["training_seconds"], device=metrics["device"].upper(),
        eval_items=eval_items,
        ppl_novels=metrics["perplexity"]["novels"], ppl_bible=metrics["perplexity"]["bible"],
        buckets=" | ".join(buckets), rule="|".join("---" for _ in buckets),
        rows="\n".join(
            f"| {kind} | " + " | ".join(f"{100 * recall[kind][b]:.0f} %" for b in buckets) + " |"
            for kind in recall
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
