"""A tiny byte-level BPE tokenizer and a byte-fallback one, built in memory."""

from functools import cache

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tandem.engine.tokenizer import Tokenizer

TEXTS = [
    "hello world the quick brown fox says stop here, then it stops",
    "日本語 emoji 😀 déjà vu",
] * 4
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def byte_level() -> Tokenizer:
    """Ids 0 and 1 are `<s>` and `</s>`; no special token is added to a prompt."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rust.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return Tokenizer(fast)


@cache
def byte_fallback() -> Tokenizer:
    """In the manner of sentencepiece: `▁` for spaces, unknown characters as `<0xNN>` tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abcdehlorw", "\u2581h", "lo", "\u2581w"]
    rust = RustTokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("\u2581", "h"), ("l", "o"), ("\u2581", "w")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=rust, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
        )
    )
