"""Make the prompts of ``eesd-bench`` from the held-out packages.

    python -m lab.pycode.make_tasks --output bench/measure/tasks.jsonl

There are five kinds of tasks. The model completes a function, continues a class, writes a
docstring, writes a test for a function, or continues a table. The output has one JSON object per
line, with ``id``, ``task``, ``source`` and ``prompt``.
"""

import ast
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from lab.pycode.corpus import held_out_files

CONTEXT_LINES = 18
TABLE_LINES = 12
SHORTEST = 250
LONGEST = 1200
"""Limits of a prompt's length in characters."""

Functions = list[ast.FunctionDef | ast.AsyncFunctionDef]


def functions(tree: ast.Module) -> Functions:
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def complete_function(lines: list[str], tree: ast.Module) -> Iterator[str]:
    """Yield passages that end with the first line of a function."""
    for node in functions(tree):
        if node.lineno > CONTEXT_LINES and lines[node.lineno - 1].endswith(":"):
            yield "\n".join(lines[node.lineno - 1 - CONTEXT_LINES : node.lineno]) + "\n"


def continue_class(lines: list[str], tree: ast.Module) -> Iterator[str]:
    """Yield parts of classes. A part goes from the first line of a class to the end of a method
    that is not the last."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            for method in methods[:-1]:
                yield "\n".join(lines[node.lineno - 1 : method.end_lineno]) + "\n\n"


def docstring(lines: list[str], tree: ast.Module) -> Iterator[str]:
    """Yield passages that end after the opening quotes of a function's docstring."""
    for node in functions(tree):
        if ast.get_docstring(node) and node.body[0].lineno > CONTEXT_LINES:
            line = node.body[0].lineno - 1
            opened = re.match(r'\s*r?"""', lines[line])
            if opened:
                yield "\n".join([*lines[line - CONTEXT_LINES : line], opened.group()])


def write_test(lines: list[str], tree: ast.Module) -> Iterator[str]:
    """Yield whole functions, each with the first line of a test for it."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            yield f"import pytest\n\n\n{source}\n\n\ndef test_{node.name}():\n"


def continue_table(lines: list[str], _: ast.Module) -> Iterator[str]:
    """Yield the first halves of blocks of similar lines in a literal."""
    for start in range(0, len(lines) - 2 * TABLE_LINES, TABLE_LINES):
        block = lines[start : start + 2 * TABLE_LINES]
        shapes = {re.sub(r"[A-Za-z_]+", "a", re.sub(r"\d+", "0", line)) for line in block}
        if all(line.rstrip().endswith(",") for line in block) and len(shapes) <= TABLE_LINES:
            opening = max(start - 3, 0)
            yield "\n".join(lines[opening : start + TABLE_LINES]) + "\n"


TASKS: dict[str, Callable[[list[str], ast.Module], Iterator[str]]] = {
    "function": complete_function,
    "class": continue_class,
    "docstring": docstring,
    "test": write_test,
    "table": continue_table,
}


@click.command()
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("bench/measure/tasks.jsonl"),
    show_default=True,
)
@click.option("--per-task", default=16, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(output: Path, per_task: int, seed: int) -> None:
    """Choose prompts evenly from the packages. If a package has too few prompts, take all of
    them."""
    rng = random.Random(seed)
    passages: dict[str, dict[str, list[str]]] = {task: {} for task in TASKS}
    for package, text in held_out_files():
        lines = text.splitlines()
        tree = ast.parse(text)
        for task, find_passages in TASKS.items():
            fitting = [
                passage
                for passage in find_passages(lines, tree)
                if SHORTEST < len(passage) < LONGEST
            ]
            passages[task].setdefault(package, []).extend(fitting)
    with output.open("w") as file:
        for task, by_package in passages.items():
            for number, (package, prompt) in enumerate(choose(by_package, per_task, rng)):
                file.write(
                    json.dumps(
                        {
                            "id": f"{task}-{number}",
                            "task": task,
                            "source": package,
                            "prompt": prompt,
                        }
                    )
                    + "\n"
                )
            click.echo(f"{task}: {sum(map(len, by_package.values()))} passages")


def choose(
    by_package: dict[str, list[str]], count: int, rng: random.Random
) -> list[tuple[str, str]]:
    """Take ``count`` passages, one from each package in turn. No passage is repeated."""
    remaining = {
        package: rng.sample(passages, len(passages))
        for package, passages in sorted(by_package.items())
    }
    chosen: list[tuple[str, str]] = []
    while len(chosen) < count and any(remaining.values()):
        chosen += [(package, passages.pop()) for package, passages in remaining.items() if passages]
    if len(chosen) < count:
        raise click.ClickException(
            f"The held-out packages have only {len(chosen)} passages for a task; lower --per-task."
        )
    rng.shuffle(chosen)
    return chosen[:count]


if __name__ == "__main__":
    main()
