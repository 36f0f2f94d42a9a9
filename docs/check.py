"""Check the pages. ``make lint`` runs this script, which needs nothing but Python.

The README must not be too long. The glossary must define each of the project's own words, the index
of docs/ must list each page, and the index of decisions must list each record.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README_WORDS = 900
WORDS = """
    root, node, level, candidate, slot, stage, plan, bucket, exact, controller, guard, pause, row,
    round, draft step, expanded node, bonus token, exit head, exit layer, draft vocabulary,
    layer cache, KV cache, engine directory, displaced node, coupled sampling, calibration prior,
    tree budget, drafts from the text, widened, own levels, packed weights, own text
"""
"""The project's own words."""


def faults() -> list[str]:
    """Returns one sentence for each fault."""
    found = []
    count = len((ROOT / "README.md").read_text("utf-8").split())
    if count > README_WORDS:
        found.append(f"README.md has {count} words; {README_WORDS} are allowed.")
    rows = (ROOT / "docs/glossary.md").read_text("utf-8").splitlines()
    glossary = " ".join(row for row in rows if row.startswith("| **"))
    words = [" ".join(word.split()) for word in WORDS.split(",")]
    missing = [word for word in words if word not in glossary]
    found += [f"docs/glossary.md lacks the word '{word}'." for word in missing]
    for folder in (ROOT / "docs", ROOT / "docs/decisions"):
        index = (folder / "README.md").read_text("utf-8")
        for path in sorted(folder.glob("*.md")):
            if path.name != "README.md" and f"({path.name})" not in index:
                name = folder.relative_to(ROOT)
                found.append(f"{name}/README.md does not list {path.name}.")
    return found


if __name__ == "__main__":
    found = faults()
    print("\n".join(found) or "pages: no fault")
    sys.exit(bool(found))
