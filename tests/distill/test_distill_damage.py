"""Tests of ``eesd-distill`` with bad input, with damaged files of an earlier run, and on a full
disk. The command prints one sentence that names the file and the remedy, and exits with code 2."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command import assert_one_line, assert_refused, listing, run, slow_but, succeed
from support.distilling import LENGTH, SMALL, read_metrics

from eesd.common.errors import EESDError
from eesd.common.files import is_temporary
from eesd.distill import teacher
from eesd.distill.cli import main
from eesd.distill.continuing import Writing

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def options(learner: Path) -> tuple[object, ...]:
    return ("--model", learner, "--exit-layer", 1, *SMALL, "--steps", 4)


ONE_SHARD = "import eesd.distill.teacher as c; c.SHARD_ROWS = 256"


@pytest.fixture(scope="module")
def stopped(
    options: tuple[object, ...], own_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The output of a run that stopped at step 2 of 4, with a cache of targets."""
    output = tmp_path_factory.mktemp("stopped") / "out"
    calls = "import eesd.distill.trainer as t; f = t.Trainer._train_step; n = iter(range(9))"
    stop = "t.Trainer._train_step = lambda *s: f(*s) if next(n) < 2 else exit(3)"
    arguments = (
        *options,
        "--data",
        own_rows,
        "-o",
        output,
        "--offline",
        output / "cache",
        "--save-every",
        2,
    )
    line = [
        sys.executable,
        "-c",
        f"{ONE_SHARD}; {calls}; {stop}; from eesd.distill.cli import main; main()",
        *map(str, arguments),
    ]
    assert subprocess.run(line, stdout=subprocess.DEVNULL).returncode == 3
    assert (output / "checkpoint-2").is_dir()
    return output


@pytest.fixture
def start(learner: Path, own_rows: Path, tmp_path: Path) -> tuple[object, ...]:
    """The arguments of a command that works."""
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


@pytest.fixture
def resumed(
    start: tuple[object, ...], stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[object, ...]:
    """The arguments that resume a copy of the stopped run in ``out``. All targets are in one
    shard."""
    monkeypatch.setattr(teacher, "SHARD_ROWS", 256)
    output = shutil.copytree(stopped, tmp_path / "out")
    return (*start, "--offline", output / "cache", "--save-every", 2)


@pytest.fixture(scope="module")
def generated(options: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that generated its own text."""
    output = tmp_path_factory.mktemp("generated") / "out"
    (output.parent / "p.jsonl").write_text('{"prompt": "def"}\n')
    succeed(main, *options, *generating(output.parent), "-o", output)
    return output


def generating(directory: Path) -> tuple[object, ...]:
    return ("--self-generate", directory / "p.jsonl", "--own-rows", 20, "--own-batch", 4)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def without_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, path)


def with_a_short_tensor(path: Path) -> None:
    tensors = load_file(path)
    large = next(name for name in sorted(tensors) if tensors[name].ndim)
    save_file(tensors | {large: tensors[large][:-1].clone()}, path)


def with_another_tensor(path: Path) -> None:
    save_file({"other": torch.zeros(3)}, path)


def text(content: str) -> Damage:
    return lambda path: path.write_text(content)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def garble(path: Path) -> None:
    path.write_bytes(b"\xff\x00garbage" * 9)


ANY: list[Damage] = [truncate, empty, garble]
TENSORS: list[Damage] = [*ANY, without_a_tensor, with_a_short_tensor, with_another_tensor]
JSON: list[Damage] = [*ANY, text("[]"), text("{}"), text("null"), text("[" * 100_000)]
QUICK = (truncate, without_a_tensor)
FILES: list[tuple[str, list[Damage]]] = [
    (
        "checkpoint-2/run.json",
        [*JSON, text('{"step": "2", "options": {}}'), text('{"step": 2, "options": []}')],
    ),
    ("checkpoint-2/head.safetensors", TENSORS),
    ("checkpoint-2/optimizer.safetensors", TENSORS),
    ("cache/cache.json", JSON),
    ("cache/shard-*.safetensors", TENSORS),
    ("cache/validation-*.safetensors", TENSORS),
]
CASES = [
    pytest.param(
        name, damage, id=f"{name}-{number}", marks=[] if damage in QUICK else pytest.mark.slow
    )
    for name, damages in FILES
    for number, damage in enumerate(damages)
]


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_a_damaged_file_is_named(
    resumed: tuple[object, ...],
    tmp_path: Path,
    name: str,
    damage: Damage,
) -> None:
    output = tmp_path / "out"
    (path,) = output.glob(name)
    damage(path)
    result = run(main, *resumed)
    assert result.exit_code == 2, result.output
    assert_one_line(result.stderr, str(output))
    # The file is a JSON object with other content.
    if "other options" in result.stderr or "other data" in result.stderr:
        return
    assert path.name in result.stderr and "delete" in result.stderr
    doomed = re.search(r"delete (/\S+?)[,;]", result.stderr)
    for target in {doomed[1] if doomed else str(path)}:
        shutil.rmtree(target) if Path(target).is_dir() else Path(target).unlink()
    succeed(main, *resumed)  # the remedy of the message works


@pytest.mark.parametrize("name", ["generation.json", "shard-00001.safetensors"])
@pytest.mark.parametrize("number", range(3))
def test_damaged_own_text_is_named(
    options: tuple[object, ...], generated: Path, tmp_path: Path, name: str, number: int
) -> None:
    output = shutil.copytree(generated, tmp_path / "out")
    ANY[number](output / "own-text" / name)
    arguments = (*options, *generating(generated.parent), "-o", output)
    assert_refused(run(main, *arguments), name, "delete")


@pytest.mark.parametrize("damage", [truncate, text('{"step": 1'), empty])
def test_a_last_line_that_was_cut_off_is_dropped(
    resumed: tuple[object, ...], tmp_path: Path, damage: Damage
) -> None:
    output = tmp_path / "out"
    damage(output / "metrics.jsonl")
    succeed(main, *resumed)
    assert read_metrics(output)[-1]["step"] == 4


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{}",
        "x",
        '{"step": "1"}',
        '{"step": 1, "loss": 2}',
        '{"step": 1, "acceptance": 5}',
        "\udcff",
        "[" * 100_000,
    ],
)
def test_damaged_metrics_are_named(resumed: tuple[object, ...], tmp_path: Path, line: str) -> None:
    output = tmp_path / "out"
    with (output / "metrics.jsonl").open("a", errors="surrogateescape") as file:
        file.write(f"{line}\n")
    assert_refused(run(main, *resumed), "metrics.jsonl", "delete it")


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["checkpoint-foo", "checkpoint-", "checkpoint-3-old", "checkpoint-\u0663"], "checkpoint-foo"
    ),
)
def test_somebodys_directories_are_left_alone(
    resumed: tuple[object, ...], tmp_path: Path, name: str
) -> None:
    output = tmp_path / "out"
    (output / name).mkdir()
    (output / name / "mine").touch()
    succeed(main, *resumed)
    assert (
        (output / name / "mine").exists()
        and (output / "checkpoint-4").is_dir()
        and not (output / "checkpoint-2").exists()
    )


@pytest.mark.parametrize("limit", slow_but([200, 5_000, 12_000, 30_000], 30_000))
def test_a_full_disk_keeps_the_last_checkpoint(
    resumed: tuple[object, ...], tmp_path: Path, limit: int
) -> None:
    """The operating system refuses to extend any file beyond a limit."""
    output = tmp_path / "out"
    before = {path.name: path.read_bytes() for path in (output / "checkpoint-2").iterdir()}
    assert max(map(len, before.values())) > 30_000

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    start = f"{ONE_SHARD}; from eesd.distill.cli import main; main()"
    line = [sys.executable, "-c", start, *map(str, resumed)]
    done = subprocess.run(line, preexec_fn=limited, capture_output=True, text=True)
    assert done.returncode == 2
    # The tokenizer is the first file written, in a scratch directory.
    place = "tokenizer.json" if limit < 1000 else str(output)
    assert_one_line(done.stderr, place, "cannot be written (", "free some space")
    assert {path.name: path.read_bytes() for path in (output / "checkpoint-2").iterdir()} == before
    assert not [path for path in output.rglob("*") if is_temporary(path.name)]
    succeed(main, *resumed)
    assert "checkpoint-4" in listing(output)


@pytest.mark.parametrize(
    "option", slow_but(["--data", "--self-generate", "--mix", "--validation"], "--data")
)
def test_json_lines_end_at_line_feeds_only(
    options: tuple[object, ...], own_rows: Path, tmp_path: Path, option: str
) -> None:
    """Strings may contain other Unicode line ends. A byte order mark is not part of the text."""
    lines = [
        json.dumps({"text": f"abc{number} \u2028\u2029\u0085\x0c" * 9}, ensure_ascii=False)
        for number in range(40)
    ]
    (tmp_path / "t.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    rest = () if option in ("--data", "--self-generate") else ("--data", own_rows)
    succeed(
        main,
        *options,
        *rest,
        option,
        tmp_path / "t.jsonl",
        "-o",
        tmp_path / "out",
        "--own-rows",
        20,
        "--steps",
        1,
    )


@pytest.mark.slow
def test_too_little_memory_is_one_sentence(
    options: tuple[object, ...], own_rows: Path, tmp_path: Path
) -> None:
    arguments = (
        "--data",
        own_rows,
        "-o",
        tmp_path / "out",
        "--batch",
        65536,
        "--length",
        512,
        "--accumulate",
        1,
    )

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.RLIM_INFINITY))

    line = [sys.executable, "-m", "eesd.distill.cli", *map(str, (*options, *arguments))]
    done = subprocess.run(line, preexec_fn=limited, capture_output=True, text=True)
    assert done.returncode == 2
    assert_one_line(done.stderr, "not enough memory", "--batch")


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
    save_file({"other": torch.ones(3)}, tmp_path / "other.safetensors")
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
