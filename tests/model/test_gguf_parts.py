"""A model in several GGUF files equals the model in the joined file, or is refused by name."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import gguf_files
from support.command import export_engine
from support.gguf_files import Spec

import eesd
from eesd.common.errors import EESDError
from eesd.export.cache import place_of
from eesd.model.checkpoint import Checkpoint
from eesd.model.tokenizer_files import resolved_tokenizer

SPEC = Spec(matrices="Q4_0", table="Q8_0")


def part(directory: Path, number: int) -> Path:
    return directory / f"model-{number:05d}-of-00004.gguf"


@pytest.fixture
def split(tmp_path: Path) -> Path:
    directory = tmp_path / "split"
    directory.mkdir()
    first = gguf_files.write(directory / "model.gguf", SPEC, most=8)
    assert sorted(directory.iterdir()) == [part(directory, number) for number in (1, 2, 3, 4)]
    assert first == part(directory, 1)
    return directory


def test_parts_are_the_model_of_the_joined_file(split: Path, tmp_path: Path) -> None:
    joined = gguf_files.write(tmp_path / "model.gguf", SPEC)
    first = part(split, 1)
    assert Checkpoint(first).fingerprint() == Checkpoint(joined).fingerprint()
    assert resolved_tokenizer(first) == resolved_tokenizer(joined)
    texts = [
        eesd.load(export_engine(model, tmp_path / name)).generate([40, 77], max_new_tokens=8)
        for model, name in ((first, "first"), (joined, "joined"))
    ]
    assert texts[0].tokens == texts[1].tokens


def test_the_cache_knows_all_parts(split: Path) -> None:
    before = place_of(split, "model", part(split, 1), {}, None)
    with part(split, 3).open("ab") as file:
        file.write(b"x")
    assert place_of(split, "model", part(split, 1), {}, None) != before


@pytest.mark.parametrize(
    ("damage", "given", "words"),
    [
        (lambda here: part(here, 3).unlink(), 1, ("00003-of-00004.gguf is missing beside it",)),
        (
            lambda here: None,
            2,
            ("one of the 4 parts", "give the first one", "model-00001-of-00004"),
        ),
        (lambda here: shutil.copy(part(here, 2), part(here, 3)), 1, ("not part 3 of 4",)),
        (
            lambda here: shutil.copy(
                gguf_files.write(
                    here / "other.gguf", Spec(matrices="Q4_0", table="Q8_0", tied=True), most=8
                ).with_name("other-00004-of-00004.gguf"),
                part(here, 4),
            ),
            1,
            ("different models", "tensors"),
        ),
    ],
)
def test_missing_and_foreign_parts_are_refused(
    split: Path, damage: Callable[[Path], object], given: int, words: tuple[str, ...]
) -> None:
    damage(split)
    with pytest.raises(EESDError) as caught:
        Checkpoint(part(split, given))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_first_part_with_another_name_is_refused(split: Path) -> None:
    other = part(split, 1).rename(split / "weights.gguf")
    with pytest.raises(EESDError, match=r"with its own name: weights-00001-of-00004\.gguf"):
        Checkpoint(other)
