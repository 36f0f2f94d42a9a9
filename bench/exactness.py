"""``python -m eesd.bench.exactness DIR...``: over how many committed positions drafting leaves every bit of the logits.

Each prompt is random tokens, so every part of the vocabulary occurs. Each is decoded plainly once and then with every way of
drafting; the logits behind each committed token are compared bit for bit.
"""

from itertools import count
from pathlib import Path

import click
import numpy as np

from eesd.common.cli import PATH, command
from eesd.runtime.compare import LogitRecord
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import LLM, Speculation, load

PROMPTS = (1, 7, 40, 129, 200)
"""Lengths, in turn."""
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, seed=1))
CHAINS = tuple(Speculation(name, guard=False) for name in ("fixed:k=2", "fixed:k=7", "threshold:p=0.4", "cost-aware-ts"))
TREES = (
    Speculation("fixed:k=4", tree_width=3, guard=False),
    Speculation("cost-aware-ts", guard=False, tree_budget=True),
)


@command()
@click.argument("directories", type=PATH, nargs=-1, required=True)
@click.option("--positions", type=click.IntRange(1), default=20_000, help="To compare in each directory, at least.")
@click.option("--new-tokens", type=click.IntRange(1), default=256, help="Of each generation.")
@click.option("--backend", default="ort")
@click.option("--threads", type=int)
@click.option("--trees", is_flag=True, help="Draft trees; their logits are the same up to rounding.")
def main(
    directories: tuple[Path, ...], positions: int, new_tokens: int, backend: str, threads: int | None, trees: bool
) -> None:
    """Count the committed positions at which a bit of the logits differs between plain decoding and drafting."""
    for directory in directories:
        llm = load(directory, backend, threads=threads)
        compared, differing, largest, other = _compare(llm, positions, new_tokens, TREES if trees else CHAINS)
        click.echo(
            f"{directory}: {differing} of {compared} positions differ, by at most {largest:.1e}; tokens differ in {other} texts"
        )


def _compare(llm: LLM, positions: int, new_tokens: int, speculations: tuple[Speculation, ...]) -> tuple[int, int, float, int]:
    """Positions compared, positions that differ, the largest difference, and texts whose tokens differ."""
    random, compared, differing, largest, other = np.random.default_rng(0), 0, 0, 0.0, 0
    for number in count():
        length = min(PROMPTS[number % len(PROMPTS)], llm.manifest.max_seq_len // 2)
        prompt = random.integers(llm.manifest.geometry.vocab_size, size=length).tolist()
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        expected = LogitRecord()
        llm.observer = expected
        llm.generate(prompt, sampling, max_new_tokens=new_tokens, draft=False, ignore_eos=True)
        for speculation in speculations:
            drafting, found = llm.with_speculation(speculation), LogitRecord(expected)
            drafting.observer = found
            drafting.generate(prompt, sampling, max_new_tokens=new_tokens, ignore_eos=True)
            compared += found.result.positions
            differing += found.result.differing
            largest = max(largest, found.result.largest)
            other += found.tokens != expected.tokens
            if compared >= positions:
                return compared, differing, largest, other
    raise AssertionError


if __name__ == "__main__":
    main()
