"""Checks of the words that this project uses: ``make lint`` runs it. It needs nothing but Python.

Pages hold five rules: short sentences, few figures in a sentence, nouns instead of "what", "who",
"those" and "whatever", "after" for an order, and "each" instead of "so many". The README has a
size. Some phrases must not grow in number in the code. The glossary has each word of ours, the
index of docs/ each page, and the index of decisions each record.

``python docs/check.py --words`` counts the words of each page. ``python docs/check.py PAGE...``
looks at any pages, also at pages that are still to do.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONGEST = {"README.md": 20}
"""The most words in a sentence of a page; 25 elsewhere."""
README_WORDS, README_FIGURES = 900, 30
PEOPLE = (
    "users?|clients?|people|persons?|readers?|engineers?"
    "|anyone|everyone|everybody|somebody|maintainers?"
)
WORDING = {
    r"\bwhat(?:ever)?\b": "name the noun",
    rf"(?<!\w)(?!(?:{PEOPLE})\b)\w*,? ?\bwho(?:ever|m)?\b": "name the noun",
    (
        r"\bthose(?= (?:of|that|which|who|whose|with|without|in|on|for|from"
        r"|are|is|were|have|has|after|before|above|below)\b)"
    ): ("name the noun"),
    r"\bthose(?=[.,;:)]|$)": "name the noun",
    r"\bso many\b": "write 'each' or the number",
    (
        r"\bbehind(?= \w)(?! (?:a|the|one) (?:proxy|load "
        r"balancer|gateway|firewall|Service))"
    ): "write 'after'",
}
"""Words that make readers search for the noun, as regular expressions, and the remedy."""
MOST = {
    "take it that": 0,
    "whoever": 1,
    "those that": 8,
    "those of which": 0,
    "what nobody": 0,
    "nobody needs": 0,
    "in vain": 0,
    "who decides": 0,
    "at most so many": 4,
}
"""The most times that a phrase may occur in pages and code. Lower a number when you have rewritten
a sentence."""
WORDS = (
    *(
        "root",
        "node",
        "level",
        "candidate",
        "slot",
        "stage",
        "plan",
        "bucket",
        "exact",
        "controller",
        "guard",
        "pause",
        "row",
    ),
    *(
        "round",
        "draft step",
        "expanded node",
        "bonus token",
        "exit head",
        "exit layer",
        "draft vocabulary",
        "layer cache",
    ),
    *(
        "KV cache",
        "engine directory",
        "displaced node",
        "coupled sampling",
        "calibration prior",
        "tree budget",
    ),
    *("drafts from the text", "widened", "own levels", "packed weights", "own text"),
)
"""The words of ours."""
FIGURE = re.compile(r"(?<![\w.,-])[.~]?\d[\d.,]*(?: %|x\b)?(?![\w-]*[A-Za-z])")
NAMED = re.compile(r"(?<=[a-z,(] )[A-Z][A-Za-z]* \d[\d.]*")
"""A number of a name, such as ``Zen 4``. It is no figure."""


def pages() -> list[Path]:
    """The pages that hold the rules."""
    first = [
        ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "ARCHITECTURE", "CHANGELOG")
    ]
    return [
        *first,
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").glob("*/README.md")),
    ]


def blocks(page: str) -> list[tuple[str, bool]]:
    """Paragraphs, list items and cells of a page without code, links and headings, and whether each
    is a cell."""
    page = re.sub(r"<!--.*?-->|^(`{3,}).*?^\1$", "", page, flags=re.DOTALL | re.MULTILINE)
    found: list[tuple[str, bool]] = []
    paragraph: list[str] = []
    in_list = False
    for line in [*page.splitlines(), ""]:
        item = re.match(r" *(?:[*-]|\d+\.) ", line)
        heading, row = line.startswith("#"), line.lstrip().startswith("|")
        if paragraph and (not line.strip() or item or heading or row):
            found.append((" ".join(paragraph), False))
            paragraph = []
        in_list = bool(item) or (in_list and (not line.strip() or line.startswith("  ")))
        if row:
            found += [
                (cell, True)
                for cell in line.strip().strip("|").split(" | ")
                if re.search(r"\w", cell)
            ]
        elif line.strip() and not heading and not re.match("    " if not in_list else " {6}", line):
            paragraph.append(line[item.end() :] if item else line.strip())
    return [(plain(text), cell) for text, cell in found]


def plain(text: str) -> str:
    """A text without marks: code is one word, a link is its text, and a link to a record has no
    number."""
    text = re.sub(r"(`+).+?\1", "CODE", text)
    text = re.sub(r"!?\[((?:[^][]|\[[^][]*\])*)\]\([^()]*(?:\([^()]*\))?[^()]*\)", r"\1", text)
    text = re.sub(r"\[[^][]*\]", "CODE", text)  # a shape
    text = re.sub(r"\b(?:decision )?0\d{3}\b|et al\.,? (?:\w+ of )?(?:ACL )?\d{4}", "CODE", text)
    return re.sub(r"[*_]{2}|(?<!\w)[*_]|[*_](?!\w)", "", text)


def sentences(page: str) -> list[tuple[str, bool]]:
    """The sentences of a page, and whether each stands in a cell. A semicolon ends one in a
    cell."""
    found = []
    for text, cell in blocks(page):
        ends = ".!?;" if cell else ".!?"
        found += [
            (sentence, cell)
            for sentence in re.split(rf"(?<=[{ends}])[)\"]* +", text)
            if sentence.strip()
        ]
    return found


def words(text: str) -> int:
    return len(re.findall(r"[^\s|]*\w[^\s|]*", text))


def figures(text: str) -> int:
    return len(FIGURE.findall(NAMED.sub("", text)))


def of_page(path: Path) -> list[str]:
    """One line for each fault of a page's sentences."""
    name = str(path.relative_to(ROOT))
    longest = LONGEST.get(name, 25)
    found = []
    for sentence, cell in sentences(path.read_text("utf-8")):
        start = f"{name}: “{sentence[:70]}…”"
        if words(sentence) > longest:
            found.append(f"{start} has {words(sentence)} words; write at most {longest}.")
        if not cell and figures(sentence) > 2:
            found.append(f"{start} has {figures(sentence)} figures; make a table of more than two.")
        if not sentence.endswith("?"):
            matches = (
                (match, remedy)
                for one, remedy in WORDING.items()
                for match in re.finditer(one, sentence, re.IGNORECASE)
            )
            found += [f"{start} has '{match[0].strip()}'; {remedy}." for match, remedy in matches]
    return found


def of_readme() -> list[str]:
    """Faults of the README's size. Figures in blocks of code do not count."""
    text = (ROOT / "README.md").read_text("utf-8")
    shown = sum(figures(text) for text, _ in blocks(text))
    counts = (("words", len(text.split()), README_WORDS), ("figures", shown, README_FIGURES))
    return [
        f"README.md has {count} {of}; {most} are allowed."
        for of, count, most in counts
        if count > most
    ]


def texts() -> list[Path]:
    """The files in which people read sentences: pages, Python and C++."""
    folders = [
        "bench",
        "controllers",
        "distill",
        "docs",
        "examples",
        "export",
        "model",
        "runtime",
        "serve",
        "tests",
    ]
    folders.append("src/eesd/common")
    found = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".md", ".py", ".h", ".cpp"}
    ]
    found += [*ROOT.glob("*.md"), *ROOT.glob("src/eesd/*.py")]
    return [
        path
        for path in found
        if path != Path(__file__) and "results" not in path.parts and path.is_file()
    ]


def faults() -> list[str]:
    """One sentence for each fault."""
    text = re.sub(
        r"\s+(?:# |// )?", " ", " ".join(path.read_text("utf-8") for path in texts())
    ).lower()
    found = []
    for phrase, most in MOST.items():
        count = text.count(phrase)
        if count > most:
            found.append(
                f"'{phrase}' occurs {count} times, and {most} are allowed; write subject, "
                "verb, object."
            )
    found += [fault for path in pages() for fault in of_page(path)]
    found += of_readme()
    glossary = " ".join(
        re.findall(
            r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs/glossary.md").read_text("utf-8"), re.MULTILINE
        )
    )
    found += [
        f"docs/glossary.md lacks the word '{word}'." for word in WORDS if word not in glossary
    ]
    for folder in (ROOT / "docs", ROOT / "docs/decisions"):
        index = (folder / "README.md").read_text("utf-8")
        names = [path.name for path in folder.glob("*.md") if path.name != "README.md"]
        found += [
            f"{folder.relative_to(ROOT)}/README.md does not list {name}."
            for name in sorted(names)
            if f"({name})" not in index
        ]
    return found


def shown_words() -> list[str]:
    """The words of each page, code and tables included; of docs/results.md, whose tables a program
    writes, only the prose."""
    counts = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").split()) for path in pages()}
    results = (ROOT / "docs/results.md").read_text("utf-8").splitlines()
    counts["docs/results.md"] = len(
        " ".join(line for line in results if not line.startswith("|")).split()
    )
    return [
        f"{count:7,} {name}" for name, count in (*counts.items(), ("in all", sum(counts.values())))
    ]


if __name__ == "__main__":
    if sys.argv[1:] == ["--words"]:
        print("\n".join(shown_words()))
        sys.exit()
    found = (
        [fault for name in sys.argv[1:] for fault in of_page(Path(name).resolve())]
        if sys.argv[1:]
        else faults()
    )
    print("\n".join(found) or "words: no fault")
    sys.exit(bool(found))
