"""Text and recall tasks for the demo model: where they come from and how rows are made.

Owns reading of the Debian packages with public-domain text, the split into training and held-out
chapters, and the synthetic recall tasks. It knows no torch and no tokenizer. The text itself is not
kept in this repository; `fetch_text` gets it with apt-get by package name.
"""

import hashlib
import random
import re
import struct
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

AUSTEN_PACKAGE = "r-cran-janeaustenr"
BIBLE_PACKAGES = ("bible-kjv-text", "bible-kjv")
END = "</s>"

NAMES = tuple(
    """
    Anna Emma Clara Dora Edith Flora Grace Helen Irene Julia Kate Laura Maria Nora Olive Paula
    Rosa Sarah Tessa Una Vera Wanda Yvonne Zoe Adam Boris Carl David Edgar Felix George Henry Ivan
    Jack Karl Louis Martin Noah Oscar Peter Quentin Ralph Simon Thomas Ulrich Victor Walter Xavier
    Alice Bella Cora Diana Ella Fanny Greta Hannah Ida Jane Kitty Lydia Mary Nancy Ophelia Penny
    Ruth Sophie Theresa Ursula Violet Winnie Albert Bruno Conrad Daniel Ernest Frank Gustav Hugo
    Isaac James Kevin Leonard Max Nathan Otto Paul Robert Samuel Theodore Vincent William Agnes
    Beatrice Charlotte Dorothy Eleanor Frances Georgia Harriet Isabel Josephine Katherine Louisa
    Margaret Natalie Rachel Susan Tamara Valerie Wilma Arthur Benjamin Charles Dennis Edward
    Frederick Gilbert Harold Jacob Lawrence Michael Norman Oliver Philip Richard Stephen Timothy
    Alan Bob Eve Mallory Trent Peggy Lena Mina Nina Tom Ben Sam Amy Lucy Eliza Ann
    """.split()  # noqa: SIM905
)
TOWNS = tuple(
    """
    Bath London York Oxford Dover Paris Rome Vienna Berlin Madrid Lisbon Dublin Oslo Athens Geneva
    Venice Naples Leeds Derby Exeter Bristol Durham Lincoln Boston
    """.split()  # noqa: SIM905
)
COLOURS = tuple(
    """
    black white brown grey red blue green yellow
    """.split()  # noqa: SIM905
)
ANIMALS = tuple(
    """
    dog cat horse cow goat sheep parrot rabbit pony donkey goose hen
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Relation:
    """A fact with one value. `fact` holds {n}, the name, and {v}, the value."""

    fact: str
    question: str
    values: tuple[str, ...]  # empty: random digits
    digits: int = 0


CODE = Relation("The code of {n} is {v}.", "What is the code of {n}?", (), 4)
RELATIONS = (
    CODE,
    Relation(
        "The number of the house of {n} is {v}.", "What is the number of the house of {n}?", (), 2
    ),
    Relation("{n} lives in {v}.", "Where does {n} live?", TOWNS),
    Relation("The horse of {n} is {v}.", "What colour is the horse of {n}?", COLOURS),
    Relation("The pet of {n} is a {v}.", "What is the pet of {n}?", ANIMALS),
)

TALK = (
    (("Who are you?", "What are you?", "What is your name?"),
     "I am a small hybrid model. I have read six novels and one old book, and I remember codes."),
    (("What can you do?", "How can you help me?", "Help."),
     "Tell me a fact, such as a code of four digits, and I can repeat it when you ask for it."),
    (("Hello.", "Hello!", "Hi.", "Hi!", "Good morning.", "Good day."),
     "Good day to you. What would you like to ask?"),
    (("How are you?", "How do you do?"), "I am very well, I thank you."),
    (("Who wrote Emma?", "Who wrote Persuasion?", "Who wrote Mansfield Park?",
      "Who wrote Pride and Prejudice?", "Who wrote Northanger Abbey?",
      "Who wrote Sense and Sensibility?"),
     "It was written by Jane Austen."),
    (("What is a hybrid model?", "What is inside you?", "How do you work?"),
     "A hybrid model mixes recurrent layers, which keep a state of fixed size, with a few "
     "attention layers, which keep every token."),
    (("Thank you.", "Thanks.", "Thank you very much."), "You are most welcome."),
    (("Goodbye.", "Bye.", "Good night."), "Goodbye, and a pleasant journey to you."),
)  # fmt: skip
NOVEL_REQUESTS = ("Tell me a story.", "Tell me a short story.", "Write something.",
                  "Write in the style of Jane Austen.", "Write a passage from a novel.",
)  # fmt: skip
BIBLE_REQUESTS = ("Write a verse.", "Write in the style of the Bible.", "Tell me a verse.")


@dataclass(frozen=True)
class Corpus:
    """Chapters of plain text, each one paragraph or several separated by blank lines."""

    novels: tuple[str, ...]
    bible: tuple[str, ...]


def fetch_text(folder: Path) -> tuple[Corpus, dict[str, str]]:
    """Download the packages into `folder` and return the text, and SHA-256 by file name.

    Needs apt-get and dpkg, and runs the Bible's own reader, an x86-64 or native Debian binary.

    Raises: subprocess.CalledProcessError when a package cannot be had; run `apt-get update` first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    packages = (AUSTEN_PACKAGE, *BIBLE_PACKAGES)
    missing = [name for name in packages if not list(folder.glob(f"{name}_*.deb"))]
    if missing:
        subprocess.run(["apt-get", "download", *missing], cwd=folder, check=True)
    root = folder / "unpacked"
    for name in packages:
        deb = next(folder.glob(f"{name}_*.deb"))
        subprocess.run(["dpkg", "-x", str(deb), str(root)], check=True)
    database = root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    verses = subprocess.run(
        [str(root / "usr/bin/bible"), "-p", str(root / "usr/lib"), "-f", "ge1:1-re22:21"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    checksums = {
        database.name: hashlib.sha256(database.read_bytes()).hexdigest(),
        "bible.txt": hashlib.sha256(verses.encode()).hexdigest(),
    }
    novels = [chapter for lines in read_lines_of_rdb(database) for chapter in split_novel(lines)]
    return Corpus(tuple(novels), tuple(split_bible(verses))), checksums


def read_lines_of_rdb(path: Path) -> Iterator[list[str]]:
    """Yield the character vectors of an R lazy-load database, one list of lines each.

    An entry is a big-endian length, then zlib data; inside is R's XDR serialisation, version 3
    (R Internals, section 1.8): a 23 byte head, then STRSXP (16), a count, and CHARSXPs.
    """
    data = path.read_bytes()
    start = 0
    while start < len(data):
        inflate = zlib.decompressobj()
        body = inflate.decompress(data[start + 4 :])
        start = len(data) - len(inflate.unused_data)
        head = struct.unpack_from(">I", body, 2)[0]
        kind, count = struct.unpack_from(">II", body, 23)
        if head != 3 or kind & 0xFF != 16:
            raise ValueError(
                f"{path}: version {head}, type {kind & 0xFF}; expected 3 and 16 (STRSXP)"
            )
        lines, offset = [], 31
        for _ in range(count):
            size = struct.unpack_from(">i", body, offset + 4)[0]
            offset += 8
            lines.append(body[offset : offset + max(size, 0)].decode("utf-8"))
            offset += max(size, 0)
        yield lines


def split_novel(lines: list[str]) -> list[str]:
    """Join hard-wrapped lines into paragraphs and cut at chapter headings."""
    chapters: list[list[str]] = [[]]
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        text = " ".join(block.split()).replace("_", "").replace("--", " - ")
        if re.match(r"(?i)(chapter|volume)\b", text) and len(text) < 30:
            chapters.append([])
        elif text:
            chapters[-1].append(" ".join(text.split()))
    return ["\n\n".join(chapter) for chapter in chapters if sum(map(len, chapter)) > 2000]


def split_bible(verses: str) -> list[str]:
    """Drop verse numbers; one document a chapter, four verses a paragraph."""
    chapters: dict[str, list[str]] = {}
    for line in verses.splitlines():
        match = re.match(r"(\w+?\d+):\d+ (.*)", line)
        if match:
            chapters.setdefault(match[1], []).append(match[2].strip())
    return [
        "\n\n".join(" ".join(chapter[i : i + 4]) for i in range(0, len(chapter), 4))
        for chapter in chapters.values()
    ]


def split_held_out(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """(training, held-out): held out are one chapter in 30 of the novels, in 40 of the Bible."""

    def cut(chapters: tuple[str, ...], every: int, held: bool) -> tuple[str, ...]:
        return tuple(c for i, c in enumerate(chapters) if (i % every == every // 2) == held)

    pairs = [(cut(corpus.novels, 30, held), cut(corpus.bible, 40, held)) for held in (False, True)]
    return Corpus(*pairs[0]), Corpus(*pairs[1])


SENTENCE_END = re.compile(
    r'(?:(?<=[.!?])|(?<=[.!?]"))(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.) (?=[A-Z"])'
)


def sentences_of(chapter: str) -> list[str]:
    """Sentences in order, without very short and very long ones."""
    found = []
    for paragraph in chapter.split("\n\n"):
        found += SENTENCE_END.split(paragraph)
    return [s for s in found if 8 < len(s) < 400]


@dataclass
class Piece:
    """A run of text; `weight` scales the loss of its tokens."""

    text: str
    weight: float = 1.0


FILLER_WEIGHT = (
    0.4  # the novels repeat far more often than recall tasks do; keep them from overfitting
)
NEW_VALUE_WEIGHT = 0.05  # a value seen for the first time is a random draw
RECALL_WEIGHT = 4.0


class TaskMaker:
    """Makes rows of text with facts, filler and questions. Deterministic for a given seed."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.rng = random.Random(seed)
        self._chapters = [sentences_of(c) for c in (*corpus.novels, *corpus.novels, *corpus.bible)]
        self._chapters = [c for c in self._chapters if len(c) > 8]
        self._corpus = corpus

    def name(self, used: set[str]) -> str:
        """A name not in `used`, which then holds it; one in five is made up."""
        rng = self.rng
        while True:
            if rng.random() < 0.2:
                parts = rng.randint(2, 3)
                pick = "".join(
                    rng.choice("bdfghklmnprstvz") + rng.choice("aeiou") for _ in range(parts)
                )
                pick = (pick + rng.choice(["", "", "n", "r", "s", "l"])).capitalize()
            else:
                pick = rng.choice(NAMES)
            if pick not in used:
                used.add(pick)
                return pick

    def value(self, relation: Relation) -> str:
        if relation.values:
            return self.rng.choice(relation.values)
        return "".join(self.rng.choice("0123456789") for _ in range(relation.digits))

    def filler(self, num_chars: int) -> str:
        """Consecutive sentences of one chapter, at least one, about `num_chars` long."""
        chapter = self.rng.choice(self._chapters)
        index = self.rng.randrange(len(chapter))
        parts = [chapter[index]]
        total = len(parts[0])
        while total < num_chars:
            index = (index + 1) % len(chapter)
            parts.append(chapter[index])
            total += len(parts[-1]) + 1
        return " ".join(parts)

    def stated(self, relation: Relation, name: str, value: str, weight: float) -> list[Piece]:
        before, after = relation.fact.format(n=name, v="\0").split("\0")
        # The space belongs to the value: byte-level BPE joins a space to the word after it.
        return [Piece(before.rstrip(" ")), Piece(" " + value, weight), Piece(after)]

    def scene(self, used: set[str], num_chars: int) -> list[Piece]:
        """One document: facts among filler, then and between them repeats and questions."""
        rng = self.rng
        is_chat = rng.random() < 0.35
        busy = rng.choice([0.15, 0.3, 0.6, 0.9])  # share of steps that are facts or questions
        num_facts = rng.randint(1, max(2, min(12, num_chars // 120)))
        names = [self.name(used) for _ in range(max(1, num_facts - rng.randint(0, num_facts // 2)))]
        todo: list[tuple[Relation, str]] = []
        for index in range(num_facts):
            relation = CODE if rng.random() < 0.65 else rng.choice(RELATIONS)
            fact = (relation, names[index % len(names)])
            if fact not in todo:
                todo.append(fact)
        upfront = rng.random() < 0.5
        known: list[tuple[Relation, str, str]] = []
        pieces: list[Piece] = []
        total = 0

        def add(more: list[Piece], glue: str = " ") -> None:
            nonlocal total
            if pieces and not pieces[-1].text.endswith("\n"):
                more = [Piece(glue), *more]
            pieces.extend(more)
            total += sum(len(piece.text) for piece in more)

        if is_chat:
            add([Piece("Question:")])
        elif rng.random() < 0.5:
            add([Piece(self.filler(rng.randint(10, max(20, num_chars // 4))), FILLER_WEIGHT)])
        while total < num_chars or todo:
            if todo and (upfront or not known or rng.random() < 0.4):
                relation, name = todo.pop(0)
                value = self.value(relation)
                add(self.stated(relation, name, value, NEW_VALUE_WEIGHT))
                known.append((relation, name, value))
            elif not is_chat and rng.random() < busy:
                relation, name, value = rng.choice(known)
                if rng.random() < 0.4:
                    add(self.asked(relation, name, value), "\n")
                else:
                    add(self.stated(relation, name, value, RECALL_WEIGHT))
            if rng.random() > busy or (not todo and is_chat):
                most = min(num_chars, 1200) if rng.random() < 0.2 else 160
                add([Piece(self.filler(rng.randint(8, max(9, most))), FILLER_WEIGHT)])
            if is_chat and not todo and rng.random() < 0.3:
                break
        add([], "")
        for turn in range(rng.randint(1, 4) if is_chat else rng.randint(0, 2)):
            relation, name, value = rng.choice(known)
            more = self.asked(relation, name, value)
            if is_chat and turn == 0:
                # The first message of a chat carries the facts and, at its end, the question.
                more[0] = Piece(more[0].text.removeprefix("Question:").lstrip())
                add(more, rng.choice([" ", " ", "\n"]))
            else:
                add(more, "\n")
        if pieces and not pieces[-1].text.endswith("\n"):
            pieces.append(Piece(f"{END}\n" if rng.random() < 0.5 else f"{END}"))
        return pieces

    def asked(self, relation: Relation, name: str, value: str) -> list[Piece]:
        question = f"Question: {relation.question.format(n=name)}\nAnswer:"
        said = self.stated(relation, name, value, RECALL_WEIGHT)
        said[0] = Piece(" " + said[0].text)
        return [Piece(question), *said, Piece(END, 2.0), Piece("\n")]

    def talk(self) -> list[Piece]:
        """One exchange that needs no memory: a greeting, a question about the model, a story."""
        rng = self.rng
        if rng.random() < 0.5:
            questions, answer = rng.choice(TALK)
            question, weight = rng.choice(questions), 1.0
        else:
            is_novel = rng.random() < 0.6
            question = rng.choice(NOVEL_REQUESTS if is_novel else BIBLE_REQUESTS)
            chapter = rng.choice(self._corpus.novels if is_novel else self._corpus.bible)
            paragraphs = [p for p in chapter.split("\n\n") if 60 < len(p) < 900]
            answer, weight = rng.choice(paragraphs or [TALK[0][1]]), FILLER_WEIGHT
        return [Piece(f"Question: {question}\nAnswer:"), Piece(" " + answer, weight),
                Piece(END, 2.0), Piece("\n")]  # fmt: skip

    def row(self, num_chars: int) -> list[Piece]:
        """Documents of at least `num_chars`; a name occurs once, so that one answer is right."""
        rng = self.rng
        used: set[str] = set()
        pieces: list[Piece] = []
        while (have := sum(len(piece.text) for piece in pieces)) < num_chars:
            if rng.random() < 0.3:
                pieces.append(Piece("<s>"))
            if rng.random() < 0.15:
                pieces += self.talk()
                continue
            left = num_chars - have
            short = rng.random() < 0.55
            pieces += self.scene(
                used, rng.randint(30, 700) if short else rng.randint(left // 3, left)
            )
        return pieces

    def recall_item(
        self, distance_chars: int, num_facts: int, is_question: bool
    ) -> tuple[str, str, str]:
        """(prompt, answer, code) with about `distance_chars` after the fact asked for."""
        rng = self.rng
        used: set[str] = set()
        facts = [(self.name(used), self.value(CODE)) for _ in range(num_facts)]
        target = rng.randrange(num_facts)
        said = [CODE.fact.format(n=n, v=v) for n, v in facts]
        prompt = self.filler(rng.randint(20, 300)) + " "
        prompt += " ".join(said[: target + 1]) + " "
        rest = said[target + 1 :]
        while rest or distance_chars > 40:
            if distance_chars > 40:
                text = self.filler(min(distance_chars, rng.randint(20, 200)))
                prompt += text + " "
                distance_chars -= len(text)
            if rest:
                prompt += rest[0] + " "
                distance_chars -= len(rest.pop(0))
        name, value = facts[target]
        if is_question:
            prompt = f"Question: {prompt}{CODE.question.format(n=name)}\nAnswer:"
            return prompt, f" The code of {name} is {value}.", value
        return f"{prompt}The code of {name} is", f" {value}.", value
