"""How long it takes to say which tokens may follow under a JSON schema, an expression and a grammar.

    python -m eesd.bench.tools.masks --engine-dir plans/

Texts are random: any allowed token may come next. Times are of the processor, so other programs hardly change them.
"""

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np

from eesd.common import cli
from eesd.common.markdown import table
from eesd.runtime.constraint import GrammarConstraint, make_constraint, vocabulary_of
from eesd.runtime.llm import LLM, load

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z.]{1,20}@[a-z]{1,20}\\.[a-z]{2,3}$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "role": {"enum": ["user", "admin", "guest"]},
    },
    "required": ["name", "age", "email", "tags", "role"],
    "additionalProperties": False,
}
ARITHMETIC = """start: sum
sum: product (("+" | "-") product)*
product: value (("*" | "/") value)*
value: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,6}/
"""
CONSTRAINTS: dict[str, Any] = {
    "json": PERSON,
    "regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}( [a-z]{1,12}){1,20}",
    "choice": [f"{place} {number}" for place in ("north", "south", "east", "west") for number in range(64)],
    "grammar": ARITHMETIC,
}
GRAMMARS = 9
"""How often each grammar is read; the median counts."""
R = TypeVar("R")


def timed(work: Callable[[], R]) -> tuple[R, float]:
    """What a function returns, and the processor's seconds that it took in this thread."""
    started = time.thread_time()
    result = work()
    return result, time.thread_time() - started


def walk(made: GrammarConstraint, eos: int, most: int, chance: random.Random) -> list[float]:
    """Seconds of each mask along a random text of at most ``most`` tokens."""
    tokens, seconds = list[int](), list[float]()
    while len(seconds) < most and eos not in tokens:
        mask, spent = timed(lambda: made.allowed(tokens))
        seconds.append(spent)
        tokens.append(int(chance.choice(np.flatnonzero(mask))))
    return seconds


def measure(kind: str, llm: LLM, tokens: int) -> list[float]:
    """Seconds to read one kind of constraint, and of ``tokens`` masks along random texts the median, p99 and the longest."""
    compiled = [timed(lambda: make_constraint(kind, CONSTRAINTS[kind], llm))[1] for _ in range(GRAMMARS)]
    masks: list[float] = []
    chance = random.Random(0)
    while len(masks) < tokens:
        made = make_constraint(kind, CONSTRAINTS[kind], llm)
        masks += walk(made, llm.manifest.eos_token_ids[0], tokens - len(masks), chance)
    return [statistics.median(compiled), statistics.median(masks), float(np.percentile(masks, 99)), max(masks)]


@cli.command()
@click.option("--engine-dir", type=cli.PATH, required=True, help="Output directory of eesd-export, with a tokenizer.")
@click.option("--tokens", type=click.IntRange(1, 10_000_000), default=1000, help="Masks of each kind of constraint.")
def main(engine_dir: Path, tokens: int) -> None:
    """Time the masks of constrained output."""
    llm = load(engine_dir, "ort", speculation=None)
    _, seconds = timed(lambda: vocabulary_of(llm))
    click.echo(f"{llm.manifest.geometry.vocab_size} tokens, prepared in {seconds:.2f} s; times in microseconds\n")
    rows = [[kind, *(f"{1e6 * one:.1f}" for one in measure(kind, llm, tokens))] for kind in CONSTRAINTS]
    click.echo("\n".join(table(["", "grammar", "median", "p99", "longest"], rows)))


if __name__ == "__main__":
    main()
