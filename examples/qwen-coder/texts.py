"""Gather prompts from Python source files, for the exit head of a model that writes code.

    texts.py DIRECTORY ... -o texts/ [--prompts 2000] [--held-out 72] [--seed 1]

The directories contain Python files, for example from the standard library, installed packages or
checkouts. The script writes ``prompts.jsonl`` (code to continue, code to fill in, and questions
about code), and ``validation.jsonl`` with prompts of the same kinds from other files.
"""

import argparse
import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

LINES = range(5, 41)
"""Prompts are made from functions and classes with this number of lines."""
MOST_CHARACTERS = 1200
"""Longer prompts are left out, because the model takes more time to read them than to continue
them."""
SIZES = range(800, 200_000)
"""Source files with fewer or more characters are skipped."""
QUESTIONS = (
    "Explain what this code does:",
    "Add type hints and a docstring to this code:",
    "Write unit tests with pytest for this code:",
    "Is there a bug in this code? Fix it.",
    "Refactor this code so that it is easier to read:",
    "Give the variables of this code better names, and change nothing else:",
)
KINDS = ("code", "code", "fill-in-the-middle", "question", "question")


def sources(directories: list[Path], random_: random.Random) -> list[str]:
    """Returns the texts of the source files, in random order."""
    paths = sorted(path for directory in directories for path in directory.rglob("*.py"))
    random_.shuffle(paths)
    texts = (path.read_text("utf-8", errors="ignore") for path in paths)
    return [text for text in texts if len(text) in SIZES]


def definitions(text: str) -> Iterator[tuple[str, str, str]]:
    """Yields the name, the docstring and the lines of each short function or class in a file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = [f"{line}\n" for line in text.split("\n")]  # ast does not break lines at form feeds
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.end_lineno is not None:
            found = lines[node.lineno - 1 : node.end_lineno]
            if len(found) in LINES:
                yield node.name, ast.get_docstring(node) or "", "".join(found)


def prompt(
    kind: str, definition: tuple[str, str, str], random_: random.Random
) -> dict[str, object]:
    """Returns a line of ``prompts.jsonl``."""
    name, docstring, code = definition
    lines = [f"{line}\n" for line in code.split("\n")][:-1]
    start = random_.randint(1, len(lines) // 2)
    if kind == "code":
        return {"kind": kind, "prompt": "".join(lines[:start])}
    if kind == "fill-in-the-middle":
        end = random_.randint(start + 1, len(lines) - 1)
        before = "".join(lines[:start])
        behind = "".join(lines[end:])
        text = f"<|fim_prefix|>{before}<|fim_suffix|>{behind}<|fim_middle|>"
        return {"kind": kind, "prompt": text}
    question = f"{random_.choice(QUESTIONS)}\n\n```python\n{dedent(code)}```"
    if docstring and random_.random() < 0.5:
        summary = docstring.partition("\n\n")[0]
        question = f"Write Python code for `{name}`: {summary}"
    return {"kind": kind, "messages": [{"role": "user", "content": question}]}


def prompts(texts: list[str], count: int, random_: random.Random) -> list[dict[str, object]]:
    """Returns prompts of all kinds, with at most four from each file."""
    found = []
    for text in texts:
        several = list(definitions(text))
        random_.shuffle(several)
        found += [one for one in several[:4] if len(one[2]) <= MOST_CHARACTERS]
    random_.shuffle(found)
    chosen = enumerate(found[:count])
    return [prompt(KINDS[index % len(KINDS)], one, random_) for index, one in chosen]


def write(path: Path, lines: list[dict[str, object]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    print(f"{path}: {len(lines)} lines")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--held-out", type=int, default=72, help="prompts for validation")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    random_ = random.Random(arguments.seed)
    texts = sources(arguments.directories, random_)
    held_out = texts[: len(texts) // 20]
    others = texts[len(held_out) :]
    arguments.output.mkdir(parents=True, exist_ok=True)
    validation = prompts(held_out, arguments.held_out, random_)
    write(arguments.output / "validation.jsonl", validation)
    write(arguments.output / "prompts.jsonl", prompts(others, arguments.prompts, random_))


if __name__ == "__main__":
    main()
