"""Make evaluation prompts from the held-out packages.

    python -m lab.pycode.make_prompts --output examples/pycode/prompts.jsonl

Each prompt is a passage of a held-out file that ends after the first line of a function or class.
The output has one JSON object per line, with ``id``, ``source`` and ``prompt``.
"""

import json
import random
from pathlib import Path

import click

from lab.pycode.corpus import held_out_files

CONTEXT_LINES = 18


def openings(text: str) -> list[str]:
    """Return passages that end with the first line of a function or class."""
    lines = text.splitlines()
    passages = []
    for number in range(CONTEXT_LINES, len(lines)):
        line = lines[number]
        if line.lstrip().startswith(("def ", "class ")) and line.endswith(":"):
            passages.append("\n".join(lines[number - CONTEXT_LINES : number + 1]) + "\n")
    return passages


@click.command()
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("examples/pycode/prompts.jsonl"),
    show_default=True,
)
@click.option("--count", default=60, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(output: Path, count: int, seed: int) -> None:
    """Choose the same number of prompts from each held-out package."""
    rng = random.Random(seed)
    by_package: dict[str, list[str]] = {}
    for package, text in held_out_files():
        by_package.setdefault(package, []).extend(p for p in openings(text) if 300 < len(p) < 1200)
    prompts: list[dict[str, object]] = []
    for package, passages in sorted(by_package.items()):
        for prompt in rng.sample(passages, count // len(by_package)):
            prompts.append({"id": len(prompts), "source": package, "prompt": prompt})
    output.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    click.echo(f"{len(prompts)} prompts from {', '.join(sorted(by_package))}")


if __name__ == "__main__":
    main()
