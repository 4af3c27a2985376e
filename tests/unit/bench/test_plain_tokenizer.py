"""The made-up tokenizer covers a vocabulary: every id has a text of its own, special ones none."""

from pathlib import Path

from tandem.bench.plain_tokenizer import write_plain_tokenizer
from tandem.engine.tokenizer import Tokenizer


def test_every_id_decodes_to_a_text_of_its_own(tmp_path: Path) -> None:
    config = {"vocab_size": 2000, "bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": None}
    write_plain_tokenizer(tmp_path, config)
    tokenizer = Tokenizer.load(tmp_path)
    special = {1, 2, 7}
    texts = {index: tokenizer.decode([index]) for index in range(2000)}
    assert {index for index, text in texts.items() if not text} == special
    words = [texts[index] for index in range(300, 2000)]
    assert len(set(words)) == len(words)
    assert all(word[0] == " " and word[1:].isalpha() for word in words)
    assert tokenizer.decode([300, 301]) == texts[300] + texts[301]


def test_any_text_comes_back(tmp_path: Path) -> None:
    write_plain_tokenizer(tmp_path, {"vocab_size": 300, "eos_token_id": 2})
    tokenizer = Tokenizer.load(tmp_path)
    text = "hello, 日本語!"
    assert tokenizer.decode(tokenizer.encode(text)) == text
