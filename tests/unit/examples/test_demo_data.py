import re
import struct
import zlib

import pytest
from demo_data import Corpus, TaskMaker, read_lines_of_rdb, split_bible, split_held_out, split_novel

CHAPTER = " ".join(f"This is sentence number {i} of a quiet chapter." for i in range(40))
CORPUS = Corpus((CHAPTER,) * 3, (CHAPTER,))


def rdb_entry(lines: list[str]) -> bytes:
    head = b"X\n" + struct.pack(">III", 3, 0x040201, 0x030500) + struct.pack(">I", 5) + b"UTF-8"
    body = head + struct.pack(">II", 16, len(lines))
    for line in lines:
        data = line.encode()
        body += struct.pack(">Ii", 0x00040009, len(data)) + data
    return struct.pack(">I", len(body)) + zlib.compress(body)


def test_rdb_reader_returns_each_vector(tmp_path):
    vectors = [["EMMA", "", "naïve"], ["one"]]
    path = tmp_path / "Rdata.rdb"
    path.write_bytes(b"".join(map(rdb_entry, vectors)))
    assert list(read_lines_of_rdb(path)) == vectors


def test_rdb_reader_refuses_other_types(tmp_path):
    body = zlib.decompress(rdb_entry(["x"])[4:])
    body = body[:23] + struct.pack(">I", 13) + body[27:]
    path = tmp_path / "Rdata.rdb"
    path.write_bytes(struct.pack(">I", len(body)) + zlib.compress(body))
    with pytest.raises(ValueError, match="type 13"):
        list(read_lines_of_rdb(path))


def test_novel_is_cut_at_chapters_and_unwrapped():
    prose = "It was a _fine_ day--so they\nsaid. " * 100
    chapters = split_novel(
        ["TITLE", "", "CHAPTER I", "", *prose.splitlines(), "", "CHAPTER II", ""]
    )
    assert len(chapters) == 1
    assert chapters[0].startswith("It was a fine day - so they said.")


def test_bible_loses_verse_numbers_and_keeps_chapters_apart():
    assert split_bible("Ge1:1 In the beginning.\nGe1:2 And.\nGe2:1 Thus.\n") == [
        "In the beginning. And.",
        "Thus.",
    ]


def test_held_out_and_training_chapters_are_a_partition():
    corpus = Corpus(tuple(f"n{i}" for i in range(70)), tuple(f"b{i}" for i in range(90)))
    train, held_out = split_held_out(corpus)
    assert sorted(train.novels + held_out.novels) == sorted(corpus.novels)
    assert sorted(train.bible + held_out.bible) == sorted(corpus.bible)
    assert held_out.novels == ("n15", "n45")


@pytest.mark.parametrize("seed", range(20))
def test_every_code_in_a_row_agrees_with_the_first_statement(seed):
    text = "".join(piece.text for piece in TaskMaker(CORPUS, seed).row(4000))
    codes: dict[str, str] = {}
    for name, code in re.findall(r"The code of (\w+) is (\d{4})\.", text):
        assert codes.setdefault(name, code) == code
    assert len(text) >= 4000


def test_rows_repeat_for_a_seed():
    assert TaskMaker(CORPUS, 3).row(500) == TaskMaker(CORPUS, 3).row(500)


@pytest.mark.parametrize("is_question", [False, True])
def test_recall_item_states_its_code_once(is_question):
    prompt, answer, code = TaskMaker(CORPUS, 1).recall_item(600, 3, is_question)
    assert prompt.count(f" is {code}.") == 1
    assert answer.endswith(f" {code}.")
    assert prompt.endswith("Answer:") == is_question
