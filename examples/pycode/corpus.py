"""Python source that every machine has, as one array of token ids.

    python corpus.py --output work/

Takes the standard library and the installed packages, keeps ``HELD_OUT`` apart for evaluation, trains a byte-level BPE
tokenizer on the rest, and writes ``tokenizer.json``, ``train.npy`` and ``heldout.npy`` (uint16, one document after another,
each opened by ``<|endoftext|>``).
"""

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END = "<|endoftext|>"

# Never trained on, wherever they lie in a path (pip and others carry copies of them).
HELD_OUT = {"click", "jinja2", "rich", "json", "logging", "http"}

# Tables, generated code and copies teach a small model nothing about Python.
SKIPPED = {
    "test",
    "tests",
    "testing",
    "encodings",
    "_vendor",
    "lib2to3",
    "pydoc_data",
    "_inductor",
    "idlelib",
    "benchmarks",
}

# Code that repeats itself from file to file may fill only so much of the corpus (characters).
PACKAGE_LIMIT = 9_000_000


def package_of(path: Path, root: Path) -> str:
    return path.relative_to(root).parts[0].removesuffix(".py")


def documents(root: Path) -> Iterator[tuple[str, bool, str]]:
    """Every usable file under ``root`` as (package, held out, text)."""
    for path in sorted(root.rglob("*.py")):
        parts = {part.removesuffix(".py") for part in path.relative_to(root).parts}
        if parts & SKIPPED or path.name.startswith(("test_", "_generated")) or ("site-packages" in parts):
            continue
        try:
            text = path.read_text("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        plain = sum(map(str.isascii, text)) > 0.995 * len(text)
        if not plain or not 400 < len(text) < 80_000 or max(map(len, text.splitlines())) > 240:
            continue
        yield package_of(path, root), bool(parts & HELD_OUT), text.expandtabs(4)


def collect(seed: int) -> tuple[list[str], list[str]]:
    """(training texts, held-out texts): no file twice, no package above its limit, in random order."""
    roots = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    seen: set[bytes] = set()
    train: list[str] = []
    heldout: list[str] = []
    found = [doc for root in roots for doc in documents(root)]
    random.Random(seed).shuffle(found)
    filled: dict[str, int] = {}
    for package, held, text in found:
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen or filled.get(package, 0) > PACKAGE_LIMIT:
            continue
        seen.add(digest)
        filled[package] = filled.get(package, 0) + len(text)
        (heldout if held else train).append(text)
    for package, size in sorted(filled.items(), key=lambda item: -item[1])[:15]:
        click.echo(f"  {package:24} {size / 1e6:6.1f} M characters", err=True)
    return train, heldout


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    return np.concatenate([np.asarray(doc, dtype=np.uint16) for doc in ids])


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=Path("work"), show_default=True)
@click.option("--vocab-size", default=4096, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(output: Path, vocab_size: int, seed: int) -> None:
    """Collect the corpus, train the tokenizer, write the token arrays."""
    output.mkdir(parents=True, exist_ok=True)
    train, heldout = collect(seed)
    tokenizer = train_tokenizer(train[: len(train) // 3], vocab_size)
    tokenizer.save(str(output / "tokenizer.json"))
    for name, texts in (("train", train), ("heldout", heldout)):
        ids = encode(tokenizer, texts)
        np.save(output / f"{name}.npy", ids)
        size = sum(map(len, texts))
        click.echo(f"{name}: {len(texts)} files, {size / 1e6:.1f} M characters, {len(ids) / 1e6:.1f} M tokens")


if __name__ == "__main__":
    main()
