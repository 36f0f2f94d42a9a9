"""Gather text that the model reads, from Debian packages and checkouts of public repositories, without any question of a test.

    texts.py PACKAGES CHECKOUTS -o texts/ --without spec_bench.jsonl [FILE ...]

PACKAGES has a directory for each package of ``SOURCES`` (``apt-get download NAME; dpkg-deb -x NAME*.deb PACKAGES/NAME``),
CHECKOUTS one for each repository of ``prompts.py``. The result is a file of JSON lines for each kind of text: passages, every
second of those in words as an answer in a chat, and conversations with the answers that people or other models gave.
"""

import argparse
import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from prompts import grams, tested

SOURCES = {
    "essays": [("anarchism", "**/sec*.html"), ("jargon-text", "**/*.txt.gz"), ("fortunes", "**/fortunes/*")],
    "manual": [("python3.11-doc", "**/html/**/*.html"), ("postgresql-doc-15", "**/*.html"), ("cmake-doc", "**/*.html")],
    "guide": [
        ("debian-handbook", "**/en-US/*.html"),
        ("gnome-user-docs", "**/C/**/*.page"),
        ("debian-reference-en", "**/*.html"),
    ],
    "reference": [
        ("git-doc", "**/*.txt"),
        ("linux-doc-6.1", "**/*.rst.gz"),
        ("sqlite3-doc", "**/*.html"),
        ("debian-policy", "**/*.html"),
    ],
    "german": [
        ("debian-handbook", "**/de-DE/*.html"),
        ("debian-reference-de", "**/*.html"),
        ("gnome-user-docs", "**/de/**/*.page"),
    ],
    "languages": [("debian-handbook", f"**/{name}/*.html") for name in ("fr-FR", "es-ES", "it-IT", "nl-NL", "pt-BR", "pl-PL")],
    "code": [
        ("golang-1.19-src", "**/*.go"),
        ("rust-src", "**/library/**/*.rs"),
        ("perl-modules-5.36", "**/*.pm"),
        ("python3-django", "**/*.py"),
        ("ruby-activerecord", "**/*.rb"),
        ("libboost1.74-dev", "**/*.hpp"),
        ("nodejs-doc", "**/*.md"),
    ],
}
"""Packages (main of Debian 12) and the files of each that are read, by kind."""
PASSAGE, LEAST = 2400, 400
"""Characters of a passage, at most and more than."""
ASKED = ("Continue this text.\n\n{}", "What comes next?\n\n{}", "{}\n\nGo on.", "Write a text that begins like this:\n{}")
BLOCKS = {"p", "div", "li", "tr", "h1", "h2", "h3", "h4", "dt", "dd", "pre", "br", "title", "section", "item"}
SKIPPED = {"script", "style", "nav", "head", "footer", "info"}


class Words(HTMLParser):
    """The words of a page: its blocks as lines, and nothing of its navigation."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.skipped = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.skipped += tag in SKIPPED
        if tag in BLOCKS:
            self.text.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.skipped -= tag in SKIPPED
        if tag in BLOCKS:
            self.text.append("\n")

    def handle_data(self, data: str) -> None:
        if self.skipped <= 0:
            self.text.append(data)


def read(path: Path) -> str:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = data.decode("utf-8", "ignore")
    if path.suffix in (".html", ".page"):
        page = Words()
        page.feed(text)
        text = re.sub(r"\n[ \t]+\n", "\n\n", "".join(page.text).replace("\t", ""))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def passages(text: str) -> Iterator[str]:
    """Pieces of whole paragraphs of about ``PASSAGE`` characters."""
    piece = ""
    for paragraph in text.split("\n\n"):
        if piece and len(piece) + len(paragraph) > PASSAGE:
            yield piece
            piece = ""
        piece = f"{piece}\n\n{paragraph}"[:PASSAGE].strip("\n")
    yield piece


def of_packages(packages: Path, kind: str) -> Iterator[list[dict[str, Any]]]:
    """The lines of each package of a kind, in random order."""
    for name, pattern in SOURCES[kind]:
        found = [piece for path in sorted((packages / name).glob(pattern)) if path.is_file() for piece in passages(read(path))]
        rng = random.Random(name)
        rng.shuffle(found)
        yield [
            line(piece, rng) if kind != "code" and i % 2 else {"text": piece}
            for i, piece in enumerate(found)
            if len(piece) > LEAST
        ]


def line(piece: str, rng: random.Random) -> dict[str, Any]:
    """A passage as a chat, in which the assistant continues what the user began."""
    cut = piece.find(" ", len(piece) // 4)
    return chat(rng.choice(ASKED).format(piece[:cut]), piece[cut:].strip())


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def answered(checkouts: Path) -> Iterator[list[dict[str, Any]]]:
    """Conversations with the answers that came with them, of each source."""
    for path in sorted((checkouts / "GPTeacher").glob("*/*instruct.json")):
        entries = json.loads(path.read_text("utf-8"))
        yield [chat("\n".join(filter(None, (e["instruction"], e["input"]))), e["response"]) for e in entries]
    lines = (checkouts / "grade-school-math/grade_school_math/data/train.jsonl").read_text("utf-8").splitlines()
    yield [chat(e["question"], re.sub(r"<<.*?>>", "", e["answer"])) for e in map(json.loads, lines)]
    for path in sorted((checkouts / "self-instruct/data/finetuning/t0_train_50k/data_per_template").glob("*.jsonl")):
        entries = [json.loads(text) for text in path.read_text("utf-8").splitlines()[90:]]
        yield [
            chat(e["prompt"].strip(), e["completion"].removesuffix("<|endoftext|>"))
            for e in entries
            if len(e["completion"]) > 150
        ]


def taken(sources: list[list[dict[str, Any]]], characters: int, tests: set[tuple[str, ...]], counts: Counter[str]) -> list[Any]:
    """Equal parts of the sources, or the whole of smaller ones: ``characters`` in all."""
    lines = []
    for number, source in enumerate(sources := sorted(sources, key=len)):
        share = characters // (len(sources) - number)
        for entry in source:
            text = entry.get("text") or "\n".join(message["content"] for message in entry["messages"])
            if not tests.isdisjoint(grams(text)):
                counts["left out: like a test"] += 1
            elif share > 0 and len(text) < 2 * PASSAGE:
                share, characters = share - len(text), characters - len(text)
                lines.append(entry)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--without", type=Path, nargs="*", default=(), help="JSON lines of tests, of which no text may be")
    parser.add_argument(
        "--characters", type=int, default=1_200_000, help="of each kind of text; eight times as many conversations"
    )
    arguments = parser.parse_args()
    tests = tested(arguments.without)
    arguments.output.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    for kind in (*SOURCES, "answered"):
        sources = list(of_packages(arguments.packages, kind) if kind in SOURCES else answered(arguments.checkouts))
        lines = taken(sources, arguments.characters * (1 if kind in SOURCES else 8), tests, counts)
        random.Random(kind).shuffle(lines)
        text = "".join(json.dumps({"kind": kind} | entry, ensure_ascii=False) + "\n" for entry in lines)
        (arguments.output / f"{kind}.jsonl").write_text(text, "utf-8")
        counts[kind] = len(text)
    print("characters:", dict(counts))


if __name__ == "__main__":
    main()
