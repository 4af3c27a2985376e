"""A tokenizer of any size for configs that come without one, so that a server can be timed.

Ids stand for bytes and then for made-up words in byte-level BPE without merges: every id decodes
to some text, as an answer of random weights needs, and no prompt is worth encoding with it.
"""

import json
import string
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

_SPACE = "\u0120"  # what byte-level BPE writes for a space
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_plain_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """Write `tokenizer.json` and its config for a model's `config.json`, whose `vocab_size` and
    special ids they follow."""
    special = {}
    for name in _SPECIAL:
        ids = config.get(name)
        for token_id in ids if isinstance(ids, list) else [ids]:
            if token_id is not None:
                special[token_id] = f"<{name.removesuffix('_token_id')}-{token_id}>"
    letters = iter([*sorted(ByteLevel.alphabet()), *_words(config["vocab_size"])])
    vocab = {special.get(index) or next(letters): index for index in range(config["vocab_size"])}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    added = [
        {
            "id": token_id,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id, content in sorted(special.items())
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "decoder": byte_level,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )


def _words(count: int) -> list[str]:
    """Different words of four letters and more, all with a space before them."""
    words = []
    for index in range(count):
        word, rest = "", index + 26**3
        while rest:
            rest, letter = divmod(rest, 26)
            word += string.ascii_lowercase[letter]
        words.append(_SPACE + word)
    return words
