"""What a draft vocabulary costs: the share of a text's tokens that it has, by the lines' category.

python -m eesd.bench.tools.draft_vocab --model MODEL --count own.jsonl --text test.jsonl --sizes "4096 8192 16384"
"""

from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from eesd.bench.measure.tasks import read_texts
from eesd.common import cli
from eesd.common.draft_vocab import most_used
from eesd.common.errors import EESDError
from eesd.common.markdown import table
from eesd.model.config import load_config
from eesd.model.hub import find_model
from eesd.runtime.text import TextCodec

Counts = NDArray[np.int64]


def count_tokens(path: Path, codec: TextCodec, vocab_size: int) -> dict[str, Counts]:
    """How often each category of a file uses each token [V]."""
    counts: dict[str, Counts] = {}
    for category, parts in read_texts(path):
        found = np.bincount(codec.encode("\n".join(parts)), minlength=vocab_size)
        counts[category] = counts.get(category, 0) + found
    return counts


@cli.command()
@click.option("--model", type=cli.NAME, required=True, help="Model directory or Hugging Face id: its tokenizer counts.")
@click.option("--count", "counted", type=cli.PATH, multiple=True, required=True, help="Text to choose tokens by; repeatable.")
@click.option("--text", "tested", type=cli.PATH, multiple=True, required=True, help="Text to test; repeatable.")
@click.option("--sizes", default="4096 8192 16384", help="Sizes of draft vocabularies, separated by spaces.")
def main(model: str, counted: tuple[Path, ...], tested: tuple[Path, ...], sizes: str) -> None:
    """Show which share of a text's tokens the draft vocabularies of several sizes have."""
    directory = find_model(model)
    config, codec = load_config(directory), TextCodec(directory)
    vocab_size = config.geometry.vocab_size
    if not sizes.split() or not all(size.isdecimal() and 1 < int(size) <= vocab_size for size in sizes.split()):
        raise EESDError(f"--sizes {sizes!r} is not a list of whole numbers from 2 to {vocab_size} separated by spaces.")
    total = np.asarray(sum(sum(count_tokens(path, codec, vocab_size).values()) for path in counted))
    chosen = {int(size): most_used(total, int(size), tuple(config.eos_token_ids)) for size in sizes.split()}
    rows: list[list[object]] = []
    for path in tested:
        for name, counts in count_tokens(path, codec, vocab_size).items():
            shares = [f"{counts[ids].sum() / max(counts.sum(), 1):.1%}" for ids in chosen.values()]
            rows.append([name, counts.sum(), *shares])
    click.echo("\n".join(table(["text", "tokens", *chosen], rows)))


if __name__ == "__main__":
    main()
