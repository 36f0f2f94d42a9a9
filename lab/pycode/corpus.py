"""Make a corpus of token ids from the Python source and the documentation on this machine.

    python -m lab.pycode.corpus --output build/work/
    python -m lab.pycode.corpus --output build/work/ --text /usr/share --vocab-size 8192

The source is the standard library and the installed packages. The packages in ``HELD_OUT`` are kept
for evaluation. ``--text`` adds the English text (Markdown, reStructuredText, plain text) of a
directory. One in a hundred of its files is held out. A byte-level BPE tokenizer is trained on the
rest. Writes ``tokenizer.json``, ``train.npy`` and ``heldout.npy``. The arrays are uint16 and have
all documents in a row, each after ``<|endoftext|>``.
"""

import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END = "<|endoftext|>"

# A file is held out if one of these names occurs anywhere in its path, because pip and other
# packages contain copies of these packages.
HELD_OUT = {"click", "jinja2", "rich", "json", "logging", "http"}

# Folders of tables, generated code and copies. A small model learns nothing about Python from them.
SKIPPED_FOLDERS = {
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

# Maximum number of characters that one package contributes, because the code of a package is
# repetitive.
PACKAGE_LIMIT = 9_000_000

TEXT_SUFFIXES = {".md", ".rst", ".txt"}

# Smallest share of letters and spaces in English. Word lists, Unicode tables and logs are plain
# text as well, but their share is smaller.
LETTERS = 0.8


def package_of(path: Path, root: Path) -> str:
    return path.relative_to(root).parts[0].removesuffix(".py")


def readable(path: Path, longest_line: int) -> str | None:
    """Return the text of a file, or None if it is not ASCII, too short, too long, or full of long
    lines."""
    try:
        text = path.read_text("utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    ascii_text = sum(map(str.isascii, text)) > 0.995 * len(text)
    usable = (
        ascii_text and 400 < len(text) < 80_000 and max(map(len, text.splitlines())) <= longest_line
    )
    return text.expandtabs(4) if usable else None


def documents(root: Path) -> Iterator[tuple[str, bool, str]]:
    """Yield (package, whether it is held out, text) of each usable Python file under ``root``."""
    for path in sorted(root.rglob("*.py")):
        parts = {part.removesuffix(".py") for part in path.relative_to(root).parts}
        if (
            parts & SKIPPED_FOLDERS
            or path.name.startswith(("test_", "_generated"))
            or ("site-packages" in parts)
        ):
            continue
        if (text := readable(path, longest_line=240)) is not None:
            yield package_of(path, root), bool(parts & HELD_OUT), text


def held_out_files() -> Iterator[tuple[str, str]]:
    """Yield (package, text) of each held-out file."""
    for root in (Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))):
        for package, held_out, text in documents(root):
            if held_out and package in HELD_OUT:
                yield package, text


def text_documents(root: Path) -> Iterator[tuple[str, bool, str]]:
    """Yield (folder, whether it is held out, text) of each usable file of English text under
    ``root``."""
    for path in sorted(
        path for path in root.rglob("*") if path.suffix in TEXT_SUFFIXES and path.is_file()
    ):
        parts = set(path.relative_to(root).parts)
        if parts & SKIPPED_FOLDERS or any(part.startswith(".") for part in parts):
            continue
        text = readable(path, longest_line=2000)
        if text is None or sum(c.isalpha() or c.isspace() for c in text) < LETTERS * len(text):
            continue
        # The content decides, so copies of a file are either all held out or all trained on.
        held_out = hashlib.sha256(text.encode()).digest()[0] * 100 < 256
        yield f"{path.parent.name}/ (text)", held_out, text


def collect(texts: Iterable[Path], seed: int) -> tuple[list[str], list[str]]:
    """Return (training texts, held-out texts) in random order, without duplicates, up to the limit
    of each package."""
    roots = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    seen: set[bytes] = set()
    train: list[str] = []
    heldout: list[str] = []
    files = [file for root in roots for file in documents(root)]
    files += [file for root in texts for file in text_documents(root)]
    random.Random(seed).shuffle(files)
    sizes: dict[str, int] = {}
    for package, held_out, text in files:
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen or sizes.get(package, 0) > PACKAGE_LIMIT:
            continue
        seen.add(digest)
        sizes[package] = sizes.get(package, 0) + len(text)
        (heldout if held_out else train).append(text)
    for package, size in sorted(sizes.items(), key=lambda item: -item[1])[:15]:
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
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("build/work"), show_default=True
)
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="Directory of English text.",
)
@click.option(
    "--tokenizer",
    "given",
    type=click.Path(path_type=Path, exists=True),
    help="Use this tokenizer.json; train none.",
)
@click.option("--vocab-size", default=4096, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(
    output: Path, texts: tuple[Path, ...], given: Path | None, vocab_size: int, seed: int
) -> None:
    """Collect the corpus, train the tokenizer (unless a tokenizer is given), and write the token
    arrays."""
    output.mkdir(parents=True, exist_ok=True)
    train, heldout = collect(texts, seed)
    tokenizer = (
        Tokenizer.from_file(str(given))
        if given
        else train_tokenizer(train[: len(train) // 3], vocab_size)
    )
    tokenizer.save(str(output / "tokenizer.json"))
    for name, parts in (("train", train), ("heldout", heldout)):
        ids = encode(tokenizer, parts)
        np.save(output / f"{name}.npy", ids)
        size = sum(map(len, parts))
        click.echo(
            f"{name}: {len(parts)} files, {size / 1e6:.1f} M characters, {len(ids) / 1e6:.1f} "
            "M tokens"
        )


if __name__ == "__main__":
    main()
