"""How long it takes to say which tokens may follow under a JSON schema, an expression and a grammar.

    python bench/masks.py --engine-dir plans/ -o masks.json

Texts are random: any allowed token may come next. Times are of the processor, so other programs hardly change them.
"""

import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np

from eesd.common import cli
from eesd.common.files import written_whole
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


def measure(kind: str, llm: LLM, tokens: int) -> dict[str, Any]:
    """Times of one kind of constraint: to read it, and of masks along random texts of ``tokens`` tokens together."""
    compiled = [timed(lambda: make_constraint(kind, CONSTRAINTS[kind], llm))[1] for _ in range(GRAMMARS)]
    masks: list[float] = []
    chance, texts = random.Random(0), 0
    while len(masks) < tokens:
        made = make_constraint(kind, CONSTRAINTS[kind], llm)
        masks += walk(made, llm.manifest.eos_token_ids[0], tokens - len(masks), chance)
        texts += 1
    return {
        "grammar_seconds": statistics.median(compiled),
        "masks": len(masks),
        "texts": texts,
        "mask_seconds": {
            "median": statistics.median(masks),
            "p99": float(np.percentile(masks, 99)),
            "longest": max(masks),
        },
    }


@cli.command()
@click.option("--engine-dir", type=cli.PATH, required=True, help="Output directory of eesd-export, with a tokenizer.")
@click.option("--tokens", type=click.IntRange(1, 10_000_000), default=1000, help="Masks of each kind of constraint.")
@click.option("-o", "--output", type=cli.PATH, help="JSON file with the report.")
def main(engine_dir: Path, tokens: int, output: Path | None) -> None:
    """Time the masks of constrained output."""
    llm = load(engine_dir, "ort", speculation=None)
    _, seconds = timed(lambda: vocabulary_of(llm))
    report: dict[str, Any] = {"vocab_size": llm.manifest.geometry.vocab_size, "vocabulary_seconds": seconds}
    report["constraints"] = {kind: measure(kind, llm, tokens) for kind in CONSTRAINTS}
    click.echo(f"{report['vocab_size']} tokens, prepared in {seconds:.2f} s; times in microseconds")
    click.echo(f"{'':10}{'grammar':>10}{'median':>10}{'p99':>10}{'longest':>10}")
    for kind, found in report["constraints"].items():
        times = [found["grammar_seconds"], *found["mask_seconds"].values()]
        click.echo(f"{kind:10}" + "".join(f"{1e6 * one:10.1f}" for one in times))
    if output is not None:
        with written_whole(output) as temporary:
            temporary.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
