"""Gather text for the model to read from Debian packages and checkouts of public repositories.
Questions of the test sets are left out.

    python -m lab.smollm2.texts PACKAGES CHECKOUTS -o texts/ [--asked asked.jsonl] [--every] \\
        [--part 2] [--times 3] --without TEST.jsonl ...

PACKAGES has a directory for each package of ``SOURCES``
(``apt-get download NAME; dpkg-deb -x NAME*.deb PACKAGES/NAME``), and CHECKOUTS has a directory for
each repository of ``prompts.py``. The result is a file of JSON lines for each kind of text. It has
passages, or conversations with the answers of people or other models. Every second passage of prose
is an answer in a chat. ``--asked`` also writes prompts about passages and about words of
dictionaries.
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
from zipfile import ZipFile

from lab.smollm2.prompts import (
    DIALOGUES,
    T0,
    TO_ENGLISH,
    dialogues,
    grams,
    instructions,
    tested,
    write,
)

LANGUAGES = ("fr-FR", "es-ES", "it-IT", "nl-NL", "pt-BR", "pl-PL")
SOURCES = {
    "essays": [
        ("anarchism", "**/sec*.html"),
        ("jargon-text", "**/*.txt.gz"),
        ("fortunes", "**/fortunes/*"),
        ("wesnoth-1.16-data", "**/*.cfg"),
        ("dict-foldoc", "**/*.dict.dz"),
        ("dict-gcide", "**/*.dict.dz"),
    ],
    "manual": [
        ("python3.11-doc", "**/html/**/*.html"),
        ("postgresql-doc-15", "**/*.html"),
        ("cmake-doc", "**/*.html"),
        ("python-django-doc", "**/*.html"),
        ("python-scipy-doc", "**/html/**/*.html"),
        ("python-sympy-doc", "**/html/**/*.html"),
    ],
    "guide": [
        ("debian-handbook", "**/en-US/*.html"),
        ("gnome-user-docs", "**/C/**/*.page"),
        ("debian-reference-en", "**/*.html"),
        ("libreoffice-help-en-us", "**/*.html"),
        ("gimp-help-en", "**/en/**/*.html"),
        ("developers-reference", "**/*.html"),
        ("aptitude-doc-en", "**/*.html"),
        ("installation-guide-amd64", "**/en/**/*.html"),
    ],
    "reference": [
        ("git-doc", "**/*.txt"),
        ("linux-doc-6.1", "**/*.rst.gz"),
        ("sqlite3-doc", "**/*.html"),
        ("debian-policy", "**/*.html"),
        ("perl-doc", "**/*.pod"),
        ("manpages", "**/*.gz"),
        ("manpages-dev", "**/*.gz"),
        ("emacs-common", "**/NEWS*"),
        ("bash-doc", "**/*.html"),
    ],
    "german": [
        ("debian-handbook", "**/de-DE/*.html"),
        ("debian-reference-de", "**/*.html"),
        ("gnome-user-docs", "**/de/**/*.page"),
        ("libreoffice-help-de", "**/*.html"),
        ("gimp-help-de", "**/de/**/*.html"),
        ("manpages-de", "**/*.gz"),
        ("installation-guide-amd64", "**/de/**/*.html"),
    ],
    "languages": [
        *(("debian-handbook", f"**/{name}/*.html") for name in LANGUAGES),
        ("manpages-fr", "**/*.gz"),
        ("manpages-es", "**/*.gz"),
        ("installation-guide-amd64", "**/fr/**/*.html"),
    ],
    "code": [
        ("golang-1.19-src", "**/*.go"),
        ("rust-src", "**/library/**/*.rs"),
        ("perl-modules-5.36", "**/*.pm"),
        ("python3-django", "**/*.py"),
        ("ruby-activerecord", "**/*.rb"),
        ("libboost1.74-dev", "**/*.hpp"),
        ("nodejs-doc", "**/*.md"),
        ("python3-sympy", "**/*.py"),
        ("python3-sklearn", "**/*.py"),
        ("python3-networkx", "**/*.py"),
        ("python3-pandas", "**/*.py"),
        ("python3-twisted", "**/*.py"),
        ("python3-sqlalchemy", "**/*.py"),
        ("php-symfony-http-kernel", "**/*.php"),
        ("ruby-actionpack", "**/*.rb"),
        ("erlang-src", "**/*.erl"),
        ("openjdk-17-source", "**/src.zip"),
    ],
}
"""For each kind of text, the packages (in main of Debian 12) and the patterns of the files to
read."""
CHARACTERS = {
    **{
        "essays": 5_200_000,
        "manual": 5_200_000,
        "guide": 6_000_000,
        "reference": 4_800_000,
        "german": 2_600_000,
    },
    **{"languages": 2_000_000, "code": 7_000_000, "answered": 25_000_000},
}
"""Number of characters of each kind of text."""
ASKED_ABOUT = {
    "guide": (
        *(
            "Summarize this text:\n\n{}",
            "Summarize the following text in three sentences.\n\n{}",
            "Explain this to a beginner:\n{}",
        ),
        *(
            "{}\n\nWrite a short summary of the text above.",
            "What are the key points of this text?\n{}",
        ),
        "Rewrite this text in simpler words:\n\n{}",
    ),
    "manual": (
        *("Summarize this text:\n\n{}", "Explain the following section of a manual:\n\n{}"),
        "{}\n\nWrite three questions about this text and answer them.",
    ),
    "essays": (
        *(
            "Continue this text.\n\n{}",
            "Summarize the following:\n{}",
            "What does the author say here?\n\n{}",
        ),
        "Extract the names and facts from this text:\n\n{}",
    ),
    "reference": ("Explain what this means:\n\n{}", "Summarize:\n{}"),
    "code": (
        *(
            "Explain what this code does:\n\n{}",
            "Continue this code:\n\n{}",
            "Write comments for this code:\n{}",
        ),
        *("Find possible problems in this code:\n\n{}", "Write tests for this code:\n{}"),
    ),
}
"""The questions about passages of each kind."""
MOST_ASKED = {
    "guide": 1500,
    "manual": 900,
    "essays": 1500,
    "reference": 600,
    "code": 2000,
    "german": 2200,
    "topic": 7000,
}
TOPICS = (
    *(
        "What is {}?",
        "Explain {} in simple terms.",
        "Write a short story about {}.",
        "Write a blog post about {}.",
    ),
    *(
        "Give five facts about {}.",
        "Write a poem about {}.",
        "Write an email to a colleague about {}.",
        "How does {} work?",
    ),
    *(
        "What are the advantages and disadvantages of {}?",
        "Describe {} to a child.",
        "List ten questions about {}.",
    ),
    *(
        "Write a dialogue between two friends about {}.",
        "Compare {} and {}.",
        "Write a lesson plan about {}.",
    ),
    "Write a Python function that has to do with {}.",
)
PASSAGE = 2400
LEAST = 400
"""The largest and the smallest number of characters of a passage."""
ASKED = (
    "Continue this text.\n\n{}",
    "What comes next?\n\n{}",
    "{}\n\nGo on.",
    "Write a text that begins like this:\n{}",
)
BLOCKS = {
    "p",
    "div",
    "li",
    "tr",
    "h1",
    "h2",
    "h3",
    "h4",
    "dt",
    "dd",
    "pre",
    "br",
    "title",
    "section",
    "item",
}
SKIPPED = {"script", "style", "nav", "head", "footer", "info"}


class Words(HTMLParser):
    """Collects the words of a page. Each block becomes a line, and the navigation is left out."""

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
    if path.suffix == ".zip":
        return java(path)
    data = (
        gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
    )
    text = data.decode("utf-8", "ignore")
    if path.suffix in (".html", ".page"):
        page = Words()
        page.feed(text)
        text = re.sub(r"\n[ \t]+\n", "\n\n", "".join(page.text).replace("\t", ""))
    elif path.suffix == ".pod":
        text = pod(text)
    elif path.suffix == ".cfg":
        text = "\n\n".join(re.findall(r'_ ?"([^"]{80,})"', text))
    elif re.search(r"\.[1-9][a-z]*\.gz$", path.name):
        text = roff(text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def java(path: Path) -> str:
    """Return the classes of Java's base. The notice at the beginning of each class is left out."""
    with ZipFile(path) as archive:
        names = [
            name
            for name in archive.namelist()
            if name.startswith("java.base/java/") and name.endswith(".java")
        ]
        sources = [archive.read(name).decode("utf-8", "ignore") for name in names]
    return "\n\n".join(
        re.sub(r"\A/\*.*?\*/", "", source, flags=re.DOTALL).strip() for source in sources
    )


def pod(text: str) -> str:
    """Return the words of Perl's documentation."""
    text = re.sub(
        r"^=(?:over|back|cut|encoding|begin|end|for).*$|^=(?:head\d|item) ",
        "",
        text,
        flags=re.MULTILINE,
    )
    for _ in range(2):
        text = re.sub(r"[BICFLESXZ]<+ ?([^<>]*?) ?>+", r"\1", text)
    return text


def roff(text: str) -> str:
    """Return the words of a manual page."""
    found = []
    for line in text.split("\n"):
        if re.match(r"\.(?:PP|P|LP|TP|IP|SH|SS|nf|fi)\b", line):
            found += ["", re.sub(r"^\.\w+ ?", "", line)]
        elif styled := re.match(r"\.(?:[BIR]{1,2}|SM) (.*)", line):
            found.append(styled[1].replace('"', ""))
        elif not line.startswith((".", "'")):
            found.append(line)
    text = re.sub(r"\\f.|\\[&/,]", "", "\n".join(found))
    text = re.sub(r"\\\((?:aq|cq|oq)|\\\[(?:aq|cq|oq)\]", "'", text)
    text = re.sub(r"\\\([lrd]q|\\\[[lrd]q\]", '"', text)
    for code, character in (("\\-", "-"), ("\\(em", "—"), ("\\ ", " "), ("\\e", "\\")):
        text = text.replace(code, character)
    return text


def passages(text: str) -> Iterator[str]:
    """Yield pieces of about ``PASSAGE`` characters. A piece consists of whole paragraphs."""
    piece = ""
    for paragraph in text.split("\n\n"):
        if piece and len(piece) + len(paragraph) > PASSAGE:
            yield piece
            piece = ""
        piece = f"{piece}\n\n{paragraph}"[:PASSAGE].strip("\n")
    yield piece


def of_packages(packages: Path, kind: str, characters: int) -> Iterator[list[str]]:
    """Yield the passages of each package of a kind in random order. Files are read until there is
    enough text for ``characters`` characters."""
    for name, pattern in SOURCES[kind]:
        paths = [path for path in sorted((packages / name).glob(pattern)) if path.is_file()]
        random.Random(name).shuffle(paths)
        found: list[str] = []
        size = 0
        for path in paths:
            pieces = [piece for piece in passages(read(path)) if len(piece) > LEAST]
            found += pieces
            size += sum(map(len, pieces))
            if size > 2 * characters:
                break
        random.Random(name).shuffle(found)
        yield found


def line(piece: str, rng: random.Random) -> dict[str, Any]:
    """Return a passage as a chat. The user gives its beginning, and the assistant continues it."""
    cut = piece.find(" ", len(piece) // 4)
    return chat(rng.choice(ASKED).format(piece[:cut]), piece[cut:].strip())


def chat(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def answered(checkouts: Path, every: bool) -> Iterator[list[dict[str, Any]]]:
    """Yield the conversations of each source. They have the answers that the source gives.

    The model also answers the questions of GPTeacher and grade-school-math itself. From the other
    sources, only conversations that are not prompts are used.
    """
    for path in sorted((checkouts / "GPTeacher").glob("*/*instruct.json")):
        yield [chat(*pair) for pair in instructions(path)]
    lines = (
        (checkouts / "grade-school-math/grade_school_math/data/train.jsonl")
        .read_text("utf-8")
        .splitlines()
    )
    yield [chat(e["question"], re.sub(r"<<.*?>>", "", e["answer"])) for e in map(json.loads, lines)]
    rest = T0(checkouts / "self-instruct", every).read
    yield [
        chat(*pair) for number, pair in enumerate(rest.items()) if len(pair[1]) >= 100 or number % 2
    ]
    roles = ("user", "assistant")
    yield [
        {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}
        for turns in dialogues(checkouts / "dstc8-schema-guided-dialogue")[DIALOGUES:][:4500]
    ]


def taken(
    sources: list[list[Any]], characters: int, tests: set[tuple[str, ...]], counts: Counter[str]
) -> list[Any]:
    """Take ``characters`` characters in total from the sources. All sources give equal parts,
    except that smaller sources are taken whole."""
    lines = []
    for number, source in enumerate(sources := sorted(sources, key=len)):
        share = characters // (len(sources) - number)
        for entry in source:
            if share <= 0:
                break
            text = (
                entry
                if isinstance(entry, str)
                else "\n".join(message["content"] for message in entry["messages"])
            )
            if len(text) >= 2 * PASSAGE:
                continue
            if not tests.isdisjoint(grams(text)):
                counts["left out: like a test"] += 1
                continue
            share = share - len(text)
            characters = characters - len(text)
            lines.append(entry)
    return lines


def asked(
    pools: dict[str, list[str]], packages: Path, times: int, rng: random.Random
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the kind and the text of prompts about passages and about words of dictionaries. Each
    kind has at most ``times`` its number in ``MOST_ASKED``."""
    most = {kind: times * count for kind, count in MOST_ASKED.items()}
    for kind, forms in ASKED_ABOUT.items():
        for piece in rng.sample(pools[kind], min(most[kind], len(pools[kind]))):
            cut = piece[: rng.choice((500, 900, 1500))].rsplit(" ", 1)[0]
            yield f"about {kind}", (rng.choice(forms).format(cut),)
    for number, piece in enumerate(
        rng.sample(pools["german"], min(most["german"], len(pools["german"])))
    ):
        sentences = [one.strip() for one in re.split(r"(?<=[.!?])\s+", piece.replace("\n", " "))]
        if fitting := [one for one in sentences if 40 < len(one) < 300]:
            yield "german", (TO_ENGLISH[number % len(TO_ENGLISH)].format(rng.choice(fitting)),)
    heads = [
        [
            line.split("\t")[0]
            for path in packages.glob(f"{name}/**/*.index")
            for line in path.read_text("utf-8").splitlines()
        ]
        for name in ("dict-foldoc", "dict-gcide")
    ]
    lists = [
        [head for head in found if re.fullmatch("[a-z][a-z +-]{3,30}", head)] for found in heads
    ]
    for _ in range(most["topic"] if all(lists) else 0):
        yield (
            "topic",
            (rng.choice(TOPICS).format(*(rng.choice(rng.choice(lists)) for _ in range(2))),),
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", type=Path)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--asked", type=Path, help="JSON lines with prompts about the passages")
    parser.add_argument(
        "--every",
        action="store_true",
        help="every prompt of T0 is a prompt, as in prompts.py --every",
    )
    parser.add_argument(
        "--part",
        type=float,
        default=1.0,
        help="part of the text to take; above 1: more, where there is more",
    )
    parser.add_argument(
        "--times", type=int, default=1, help="how many times as many prompts to ask"
    )
    parser.add_argument(
        "--without",
        type=Path,
        nargs="*",
        default=(),
        help="JSON lines of tests, of which no text may be",
    )
    arguments = parser.parse_args()
    tests = tested(arguments.without)
    arguments.output.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    pools: dict[str, list[str]] = {}
    for kind, most in CHARACTERS.items():
        characters = int(most * arguments.part)
        rng = random.Random(kind)
        of_kind = of_packages(arguments.packages, kind, characters) if kind in SOURCES else None
        sources: list[list[Any]] = [*(of_kind or answered(arguments.checkouts, arguments.every))]
        lines = taken(sources, characters, tests, counts)
        rng.shuffle(lines)
        if kind in SOURCES:
            pools[kind] = [
                piece for source in sources for piece in source[-4000 * arguments.times :]
            ]
            lines = [
                line(piece, rng) if kind != "code" and i % 2 else {"text": piece}
                for i, piece in enumerate(lines)
            ]
        text = "".join(
            json.dumps({"kind": kind} | entry, ensure_ascii=False) + "\n" for entry in lines
        )
        (arguments.output / f"{kind}.jsonl").write_text(text, "utf-8")
        counts[kind] = len(text)
    print("characters:", dict(counts))
    if arguments.asked is not None:
        write(
            arguments.asked,
            asked(pools, arguments.packages, arguments.times, random.Random(1)),
            tests,
            1,
        )


if __name__ == "__main__":
    main()
