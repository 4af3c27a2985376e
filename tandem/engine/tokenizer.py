"""Text to token ids and back, and the model's chat template. Imports no torch.

`Tokenizer` wraps one fast tokenizer of a checkpoint folder. It knows no requests; the decoding of
a growing answer is outputs.py's.
"""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast

from tandem.errors import ModelError, RequestError

# What a tokenizer is made of; `tandem route` fetches these from an engine.
FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# Encoding a longer text takes long enough to be noticed by others.
LONG_TEXT_CHARS = 4096
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Arguments of the template engine itself, which a request must not set.
_RESERVED_TEMPLATE_NAMES = frozenset(
    {"conversation", "messages", "chat_template", "tokenize", "add_generation_prompt", "tools"}
    | {"documents", "return_dict", "return_tensors", "padding", "truncation", "max_length"}
)


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return table


class Tokenizer:
    """One checkpoint's tokenizer. All methods are safe to call from several threads."""

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        self._fast = fast
        self._backend = fast.backend_tokenizer
        self._files: dict[str, bytes] | None = None

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read the tokenizer of an HF checkpoint folder.

        Raises: ModelError when there is no folder or no `tokenizer.json`, it cannot be read, or its
            chat template is no template.
        """
        path = Path(folder)
        if not path.is_dir():
            raise ModelError(f"{path} does not exist; expected a local HF model folder")
        if not (path / "tokenizer.json").is_file():
            raise ModelError(
                f"{path} holds no tokenizer.json; expected the fast tokenizer that "
                "transformers' save_pretrained writes; convert the slow one and save it there"
            )
        try:
            fast = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # the readers below raise plain Exception for broken files
            raise ModelError(f"the tokenizer in {path} cannot be read: {error}") from error
        tokenizer = cls(fast)
        tokenizer._check_template(path)
        tokenizer._files = {
            name: (path / name).read_bytes() for name in FILE_NAMES if (path / name).is_file()
        }
        return tokenizer

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "Tokenizer":
        """Build from the contents of FILE_NAMES, as `files` returned them elsewhere."""
        with tempfile.TemporaryDirectory(prefix="tandem-tokenizer-") as folder:
            for name in FILE_NAMES:
                if name in files:
                    (Path(folder) / name).write_bytes(files[name])
            return cls.load(folder)

    def files(self) -> dict[str, bytes]:
        """Contents of the files that this tokenizer was read from, by name."""
        if self._files is None:
            with tempfile.TemporaryDirectory(prefix="tandem-tokenizer-") as folder:
                self._fast.save_pretrained(folder)
                self._files = {
                    name: (Path(folder) / name).read_bytes()
                    for name in FILE_NAMES
                    if (Path(folder) / name).is_file()
                }
        return self._files

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= LONG_TEXT_CHARS:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # encode() keeps Python's global lock until it is done (tokenizers 0.23); batches let go.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Plain decoding, without clean-up of spaces, which no stream could follow.

        Ids beyond the vocabulary (padding rows of the embedding) decode to nothing.
        """
        text = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return str(text)

    def _check_template(self, path: Path) -> None:
        """What cannot be compiled would fail every chat; what refuses these messages is well."""
        if not self.has_chat_template:
            return
        try:
            self._fast.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template in {path} is no valid Jinja, line {error.lineno}: {error}"
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError, KeyError):
            return

    @property
    def has_chat_template(self) -> bool:
        return self._fast.chat_template is not None

    def render_chat(
        self, messages: list[dict[str, Any]], template_args: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt text of a conversation, up to where the assistant's answer begins.

        Raises: RequestError when the model has no template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template; send a prompt to /v1/completions instead",
                "messages",
            )
        for name in template_args or {}:
            if name in _RESERVED_TEMPLATE_NAMES:
                raise RequestError(
                    f"chat_template_kwargs must not set {name!r}", "chat_template_kwargs"
                )
        try:
            text = self._fast.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **(template_args or {})
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a part of a character is returned as it is."""
        added = self._added_tokens.get(token_id)
        if added is not None:
            return added.encode()
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if "ByteLevel" in self._decoders:
            alphabet = _BYTE_LEVEL
            if all(char in alphabet for char in piece):
                return bytes(alphabet[char] for char in piece)
            return str(piece).encode()
        match = _BYTE_TOKEN.fullmatch(piece) if "ByteFallback" in self._decoders else None
        if match is not None:
            return bytes([int(match[1], 16)])
        if self._decoders & {"Metaspace", "Replace"}:
            return str(piece).replace("\u2581", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    @cached_property
    def _added_tokens(self) -> dict[int, str]:
        return {index: str(token) for index, token in self._fast.added_tokens_decoder.items()}

    @cached_property
    def _decoders(self) -> set[str]:
        """Types of the steps that the tokenizer decodes with, such as ByteLevel."""
        decoder = json.loads(self._backend.to_str()).get("decoder") or {}
        steps = decoder.get("decoders", [decoder])
        return {step["type"] for step in steps if "type" in step}


_BYTE_LEVEL = _byte_level_alphabet()
