"""Bad input to ``eesd-distill`` is refused with one sentence and exit code 2."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.command import assert_one_line, assert_refused, run, succeed
from support.distilling import LENGTH, SMALL

from eesd.common.errors import EESDError
from eesd.distill import teacher
from eesd.distill.cli import main
from eesd.distill.continuing import Writing


@pytest.fixture
def start(learner: Path, own_rows: Path, tmp_path: Path) -> tuple[object, ...]:
    """Arguments of a command that works."""
    return (
        "--model",
        learner,
        "--exit-layer",
        1,
        "--data",
        own_rows,
        "-o",
        tmp_path / "out",
        *SMALL,
        "--steps",
        4,
    )


def without(start: tuple[object, ...], option: str) -> tuple[object, ...]:
    at = start.index(option)
    return start[:at] + start[at + 2 :]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", "", ("nothing to train on", "empty.txt")),
        ("short.jsonl", '{"text": "ab"}\n', ("nothing to train on",)),
        ("bad.jsonl", "{nonsense\n", ("line 1", "JSON")),
        ("list.jsonl", "[1]\n", ("line 1", "object")),
        ("other.jsonl", '{"question": "?"}\n', ("no prompt, text or messages",)),
    ],
)
def test_data_without_usable_rows_is_refused(
    start: tuple[object, ...], tmp_path: Path, name: str, content: str, words: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(content)
    assert_refused(run(main, *without(start, "--data"), "--data", tmp_path / name), *words)


@pytest.mark.parametrize("option", ["--data", "--self-generate", "--mix", "--validation"])
def test_bad_files_are_refused_before_the_long_work(
    start: tuple[object, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
) -> None:
    """No weights are loaded, and no text is written."""

    def work(*_: object) -> None:
        raise AssertionError("the long work began")

    for name in ("load_decoder", "EngineWriter", "TorchWriter", "self_prompts", "EngineTeacher"):
        monkeypatch.setattr(f"eesd.distill.run.{name}", work)
    (tmp_path / "bad.jsonl").write_text("{nonsense\n")
    options = (*without(start, "--data"), "--own-text", tmp_path / "own")
    assert_refused(run(main, *options, option, tmp_path / "bad.jsonl"), "line 1", "JSON")


def test_files_without_tokens_are_refused(start: tuple[object, ...], tmp_path: Path) -> None:
    rest = without(start, "--data")
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa" * 100)
    assert_refused(run(main, *rest, "--data", tmp_path / "latin.txt"), "latin.txt", "UTF-8")
    np.save(tmp_path / "floats.npy", np.ones((4, 40)))
    assert_refused(run(main, *rest, "--data", tmp_path / "floats.npy"), "floats.npy", "integers")
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert_refused(
        run(main, *rest, "--data", tmp_path / "pickled.npy"),
        "pickled.npy",
        "not an array of tokens",
    )
    save_file({"other": np.ones(3)}, tmp_path / "other.safetensors")
    assert_refused(run(main, *rest, "--data", tmp_path / "other.safetensors"), "tensor `tokens`")
    assert_refused(run(main, *rest, "--data", tmp_path / "absent.npy"), "absent.npy", "not a file")


@pytest.mark.parametrize(
    ("rows", "token", "words"),
    [(40, 97, ("token 97", "model's tokenizer")), (3, 5, ("only 3 rows", "--validation"))],
)
def test_rows_that_do_not_fit_are_refused(
    start: tuple[object, ...], tmp_path: Path, rows: int, token: int, words: tuple[str, ...]
) -> None:
    np.save(tmp_path / "rows.npy", np.full((rows, LENGTH + 1), token))
    assert_refused(run(main, *without(start, "--data"), "--data", tmp_path / "rows.npy"), *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--exit-layer", 3), ("exit layer", "between 1 and 2", "3")),
        (("--blocks", 4), ("blocks", "4")),
        (("--length", 1000), ("--length 1000", "512")),
        (("--ce", 0, "--kl", 0), ("--ce", "above 0")),
        (("--self-generate", __file__), ("either --data", "--self-generate")),
        (("--eval-every", 0), ("--eval-every",)),
    ],
)
def test_invalid_options_are_refused(
    start: tuple[object, ...], options: tuple[object, ...], words: tuple[str, ...]
) -> None:
    assert_refused(run(main, *start, *options), *words)


def test_sharding_is_refused(start: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert_refused(run(main, *start), "a copy of the head", "unset ACCELERATE_USE_FSDP")


def test_resuming_with_other_options_is_refused(start: tuple[object, ...], tmp_path: Path) -> None:
    succeed(main, *start)
    assert_refused(run(main, *start, "--lr", 0.5), "other options", "lr: 0.003, now 0.5")
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    assert_refused(
        run(main, *start, "--init-head", tmp_path / "copy"), "other options", "init_head"
    )


def test_a_cache_of_other_data_or_damaged_shards_is_refused(
    start: tuple[object, ...], tmp_path: Path
) -> None:
    offline = ("--offline", tmp_path / "cache")
    succeed(main, *start, *offline)
    other = tmp_path / "other"
    assert_refused(
        run(main, *without(start, "-o"), "-o", other, *offline, "--top-k", 7),
        "other data or options",
        "top_k",
    )
    (tmp_path / "cache" / "shard-00000.safetensors").write_bytes(b"12345678")
    assert_refused(
        run(main, *without(start, "-o"), "-o", other, *offline), "shard-00000", "delete it"
    )


def test_a_cache_larger_than_the_disk_is_refused(
    start: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: usage._replace(free=1000) if path == tmp_path / "cache" else usage,
    )
    assert_refused(run(main, *start, "--offline", tmp_path / "cache"), "GB more", "--top-k")
    assert not list((tmp_path / "cache").glob("shard-*"))


def test_a_loss_that_is_not_a_number_keeps_the_last_checkpoint(
    start: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*start, "--save-every", 2)
    batch = teacher.TargetCache.batch

    def poisoned(self: teacher.TargetCache, indices: np.ndarray, layers: Sequence[int]) -> object:
        result = batch(self, indices, layers)
        calls.append(1)
        if len(calls) == 4:
            result.hidden[0][0, 0, 0] = float("nan")
        return result

    calls: list[int] = []
    monkeypatch.setattr(teacher.TargetCache, "batch", poisoned)
    result = run(main, *arguments)
    assert result.exit_code == 2
    assert_one_line(result.stderr, "step 4", "not a number", "--lr")
    assert (tmp_path / "out" / "checkpoint-2" / "run.json").exists()
    assert json.loads((tmp_path / "out" / "exit_head.json").read_text())["trained"]


def test_generated_text_of_other_options_is_refused(
    start: tuple[object, ...], tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "def"}\n')
    arguments = (
        *without(start, "--data"),
        "--self-generate",
        tmp_path / "p.jsonl",
        "--own-rows",
        20,
        "--own-batch",
        20,
    )
    succeed(main, *arguments)
    assert_refused(run(main, *arguments, "--temperatures", "1"), "other options", "temperatures")
    assert_refused(run(main, *arguments, "--temperatures", "hot"), "--temperatures", "hot")


def test_an_initial_head_of_another_shape_is_refused(
    start: tuple[object, ...], tmp_path: Path
) -> None:
    succeed(main, *start)
    rest = (*without(start, "-o"), "-o", tmp_path / "second", "--init-head", tmp_path / "out")
    assert_refused(run(main, *rest, "--blocks", 2), "--blocks 1")
    succeed(main, *rest)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts": [[5]]}, "same number of each"),
        ({"temperatures": [0.0]}, "same number of each"),
        ({"prompts": [[5], []]}, "no tokens"),
        ({"temperatures": [0.0, -1.0]}, "0 or above"),
        ({"rows": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_written_is_refused(change: dict[str, Any], words: str) -> None:
    good = Writing([[5], [6]], [9, 9], [0.0, 1.0], np.random.default_rng, (), rows=1)
    assert good.waiting() == [1, 0]
    with pytest.raises(EESDError, match=words):
        replace(good, **change)
