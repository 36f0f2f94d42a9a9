"""Checks of the words that this project uses: ``make lint`` runs it. It needs nothing but Python.

Some phrases make sentences hard to read, and their number must not grow. The glossary has each word of ours, the index of
docs/ each page, and the index of decisions each record.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
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
"""The most times that a phrase may occur. Lower a number when you have rewritten a sentence."""
WORDS = (
    *("root", "node", "level", "candidate", "slot", "stage", "plan", "bucket", "exact", "controller", "guard", "pause", "row"),
    *("round", "draft step", "expanded node", "bonus token", "exit head", "exit layer", "draft vocabulary", "layer cache"),
    *("KV cache", "engine directory", "displaced node", "coupled sampling", "calibration prior", "tree budget"),
    *("drafts from the text", "widened", "own levels", "packed weights", "own text"),
)
"""The words of ours."""


def texts() -> list[Path]:
    """The files in which people read sentences: pages, Python and C++."""
    folders = ["bench", "controllers", "distill", "docs", "examples", "export", "model", "runtime", "serve", "tests"]
    folders.append("src/eesd/common")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in {".md", ".py", ".h", ".cpp"}]
    found += [*ROOT.glob("*.md"), *ROOT.glob("src/eesd/*.py")]
    return [path for path in found if path != Path(__file__) and "results" not in path.parts and path.is_file()]


def faults() -> list[str]:
    """One sentence for each fault."""
    text = re.sub(r"\s+(?:# |// )?", " ", " ".join(path.read_text("utf-8") for path in texts())).lower()
    found = []
    for phrase, most in MOST.items():
        count = text.count(phrase)
        if count > most:
            found.append(f"'{phrase}' occurs {count} times, and {most} are allowed; write subject, verb, object.")
    glossary = " ".join(re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs/glossary.md").read_text("utf-8"), re.MULTILINE))
    found += [f"docs/glossary.md lacks the word '{word}'." for word in WORDS if word not in glossary]
    for folder in (ROOT / "docs", ROOT / "docs/decisions"):
        index = (folder / "README.md").read_text("utf-8")
        pages = [path.name for path in folder.glob("*.md") if path.name != "README.md"]
        found += [
            f"{folder.relative_to(ROOT)}/README.md does not list {name}." for name in sorted(pages) if f"({name})" not in index
        ]
    return found


if __name__ == "__main__":
    found = faults()
    print("\n".join(found) or "words: no fault")
    sys.exit(bool(found))
