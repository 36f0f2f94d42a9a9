"""Tests that a command never loses files that it did not make. Some of them are where the command
writes, and some appear while it runs."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest
from click.testing import Result
from support.command import (
    add_tokenizer,
    assert_one_line,
    assert_refused,
    contents,
    listing,
    run,
    succeed,
)
from support.distilling import SMALL

import eesd
from eesd.bench.cli import main as bench_main
from eesd.common import files
from eesd.common.errors import EESDError
from eesd.common.manifest import load_manifest
from eesd.distill.cli import main as distill_main
from eesd.export import cache as caches
from eesd.export import prepare
from eesd.export.build import main as build_main
from eesd.export.cache_cli import main as cache_main
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.runtime.cli import main as run_main
from eesd.runtime.doctor import main as doctor_main
from eesd.runtime.engines.cpu_build import place_of
from eesd.serve.cli import main as serve_main

RESULT = Path(__file__).parent.parent / "data/bench_result.json"
CASES = int(os.environ.get("FOREIGN_CASES", "100"))
"""The number of commands in the property test. A thorough run needs thousands of commands."""
AS_IS = ("--exit-layer", 1, "--no-check", "--no-pack")
ENTRY = "model-0123456789abcdef"
PLACES = [
    *(
        "",
        "plans",
        "plans/cpu-0123456789abcdef",
        "plans/more",
        "out",
        "out/checkpoint-2",
        "out/engine-0",
        "out/own-text",
    ),
    *("a/b", f"cache/{ENTRY}", "cache/mine-0123456789abcdef", "repository/eesd/1"),
]
NAMES = [
    *(
        "thesis.txt",
        "manifest.json",
        "weights.bin",
        "notes.json",
        "mine.onnx",
        "mine.plan",
        "README.md",
        "report.md",
    ),
    *(
        "exit_head.json",
        "exit_head.safetensors",
        "run.json",
        "metrics.jsonl",
        "eesd-cache.json",
        "result.json",
    ),
]
TARGETS = [
    *(
        "plans",
        "out",
        "cache",
        "repository",
        "a",
        "a/b",
        "new",
        "plans/draft.onnx",
        "thesis.txt",
        "report.md",
        "link",
        "loop",
    ),
    *("plans/new", "out/new"),
]


class World:
    """A directory with files of EESD and foreign files. It keeps a record of the foreign files."""

    def __init__(self, root: Path, engine: Path, random: Random) -> None:
        self.root = root
        self.random = random
        self.foreign: dict[Path, bytes | str] = {}
        root.mkdir()
        if random.random() < 0.7:
            shutil.copytree(engine, root / "plans")
        if random.random() < 0.5:
            entry = shutil.copytree(engine, root / "cache" / ENTRY)
            caches.mark(entry, entry, "model", {})
        for _ in range(random.randrange(1, 6)):
            self.plant(root / random.choice(PLACES) / random.choice(NAMES))
        for name in ("link", "loop", *random.sample([f"{place}/link" for place in PLACES], 2)):
            self.link(
                root / name,
                name if name == "loop" else random.choice([*TARGETS, "nowhere", "..", "../.."]),
            )

    def plant(self, path: Path) -> None:
        """Put a foreign file where nothing exists."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(path):
                path.write_bytes(self.random.randbytes(9))
                self.foreign[path.parent.resolve() / path.name] = path.read_bytes()
        except OSError:
            return  # a file or a loop is in the way

    def link(self, path: Path, target: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(path):
                path.symlink_to(path.name if target == path.name else self.root / target)
                self.foreign[path.parent.resolve() / path.name] = str(path.readlink())
        except OSError:
            return

    def any_path(self) -> Path:
        """Returns a path for a command. It is plain, leads through a link, or contains ".."."""
        path = self.root / self.random.choice(TARGETS)
        return path / self.random.choice(["", "", "", "new/..", "../plans", "link", "link/.."])

    def intrude(self, path: Path) -> None:
        """Act as another program while a command writes ``path``. If the path is a directory, a
        file appears in it, and otherwise next to it."""
        directory = path if path.is_dir() or not path.suffix else path.parent
        if self.random.random() < 0.7:
            self.plant(
                directory / self.random.choice([name for name in NAMES if name != path.name])
            )
        else:
            self.link(
                directory / "link" if directory.exists() else directory, self.random.choice(TARGETS)
            )

    def intrude_once(self, left: list[int], path: Path) -> None:
        """Intrude at the call whose number is in ``left``."""
        left[0] -= 1
        if (
            not left[0]
            and path.is_relative_to(self.root)
            and not any(map(files.is_temporary, path.parts))
        ):
            self.intrude(path)

    def lost(self) -> list[Path]:
        """Returns the foreign files that are missing or changed."""
        return [path for path, was in self.foreign.items() if found(path) != was]


def found(path: Path) -> bytes | str | None:
    """Returns the bytes of a file, or the target if the path is a link."""
    if path.is_symlink():
        return str(path.readlink())
    return path.read_bytes() if path.is_file() else None


@pytest.fixture
def commands(
    text_model: Path,
    learner: Path,
    own_rows: Path,
    engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> list[Callable[[Path], Result]]:
    """Returns commands that each write, replace or clean a path. Slow commands occur less often in
    the list."""
    export = prepare.main.callback
    assert export
    monkeypatch.setattr(prepare, "_run", lambda command: export(command[-1]))  # in this process
    monkeypatch.setenv("EESD_CACHE_DIR", str(tmp_path / "cache"))
    ask = ("-p", "hello", "-n", 2, "--no-stats")
    exit_only = ("--exit-layer", 1, "--steps", 0, "--blocks", 0, "--data", own_rows, *SMALL)

    def on_model(path: Path) -> Result:
        return run(run_main, "--model", text_model, *ask, "--exit-layer", 1, "--cache-dir", path)

    quick: list[Callable[[Path], Result]] = [
        lambda path: run(export_main, "--model", text_model, "-o", path, *AS_IS),
        lambda path: run(export_main, "--model", path, "-o", path, *AS_IS),
        lambda path: run(run_main, "--engine-dir", path, *ask),
        lambda path: run(cache_main, "clean", "--all", "--cache-dir", path),
        lambda path: run(bench_main, "report", RESULT, "-o", path),
        lambda path: run(serve_main, "--engine-dir", engine, "--triton-repo", path),
        lambda path: run(inspect_main, path),
        lambda path: run(build_main, path, "--target", "cpu", "--force"),
    ]
    slow: list[Callable[[Path], Result]] = [
        on_model,
        lambda path: run(distill_main, "--model", learner, "-o", path, *exit_only),
        lambda path: run(
            distill_main,
            "--model",
            learner,
            "-o",
            path,
            *exit_only[:2],
            *exit_only[6:],
            "--steps",
            2,
            "--save-every",
            1,
        ),
    ]
    return 3 * quick + slow


@pytest.fixture
def at_claim(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[Path], None]]]:
    """Functions in this list are called with each path that a command begins to write, or is about
    to move aside."""
    called: list[Callable[[Path], None]] = []
    claim = files._new_claim
    rename = Path.rename

    def claiming(target: Path) -> tuple[files.Claim, int]:
        made = claim(target)
        for one in called:
            one(target)
        return made

    def renaming(path: Path, to: Path) -> Path:
        for one in called:
            one(path)
        return rename(path, to)

    monkeypatch.setattr(files, "_new_claim", claiming)
    monkeypatch.setattr(Path, "rename", renaming)
    yield called


def test_nothing_foreign_is_lost(
    commands: list[Callable[[Path], Result]],
    engine: Path,
    tmp_path: Path,
    at_claim: list[Callable[[Path], None]],
) -> None:
    done = 0
    for case in range(CASES):
        random = Random(case)
        world = World(tmp_path / str(case), engine, random)
        command = random.choice(commands)
        path = world.any_path()
        at_claim[:] = [partial(world.intrude_once, [random.randrange(1, 6)])]
        result = command(path)
        at_claim.clear()
        assert result.exit_code in (0, 2) and isinstance(result.exception, SystemExit | None), (
            case,
            path,
            result.exception,
        )
        assert result.exit_code == 0 or "error: " in result.stderr, (case, path, result.stderr)
        assert not world.lost(), (case, path, world.lost(), result.output)
        done += result.exit_code == 0
        files._delete(world.root)
    assert done > CASES / 5


@pytest.mark.parametrize("model_is_output", [False, True])
def test_an_output_is_what_its_path_names(
    text_model: Path, tmp_path: Path, model_is_output: bool
) -> None:
    """``new`` does not exist, so ``new/..`` does not exist either before ``new`` is made."""
    mine = shutil.copytree(text_model, tmp_path / "mine") if model_is_output else tmp_path / "mine"
    (mine / "more").mkdir(parents=True)
    (mine / "thesis.txt").write_text("thesis")
    before = contents(tmp_path)
    result = run(export_main, "--model", text_model, "-o", mine / "new" / "..", *AS_IS)
    assert_refused(result, f"{mine} is not replaced", "not an engine directory", "another --output")
    assert contents(tmp_path) == before


def arrive(what: str, engine: Path, output: Path) -> None:
    """Write a foreign file where an export is to write."""
    if what == "another export":
        shutil.copytree(engine, output)
    elif what == "a link":
        output.symlink_to(shutil.copytree(engine, output.with_name("other")).name)
    else:
        output.mkdir()
        (output / "thesis.txt").write_text("thesis")


def assert_both_are_there(stderr: str, output: Path, before: dict[str, bytes]) -> None:
    """Both the foreign file and the export exist, and the message names the export."""
    assert_one_line(stderr, f"{output} is not replaced", "the new content is in")
    (kept,) = output.parent.glob("plans-*")
    assert (
        str(kept) in stderr
        and "all files are as exported" in succeed(inspect_main, kept, "--verify").stdout
    )
    shutil.rmtree(kept)
    assert contents(output.parent) == before


@pytest.mark.parametrize("what", ["thesis", "another export", "a link"])
def test_what_comes_while_an_export_runs_is_kept(
    text_model: Path,
    engine: Path,
    tmp_path: Path,
    what: str,
    at_claim: list[Callable[[Path], None]],
) -> None:
    output = tmp_path / "plans"
    before: dict[str, bytes] = {}

    def come(path: Path) -> None:
        if path == output and claims and claims.pop():
            arrive(what, engine, output)
            before.update(
                {
                    name: content
                    for name, content in contents(tmp_path).items()
                    if "eesd-" not in name
                }
            )

    claims = [True, False, False]  # the first two test whether the place is writable
    at_claim[:] = [come]
    result = run(export_main, "--model", text_model, "-o", output, *AS_IS)
    at_claim.clear()
    assert result.exit_code == 2
    assert_both_are_there(result.stderr, output, before)
    assert output.is_symlink() == (what == "a link")


def test_only_names_of_the_manifest_are_replaced(text_model: Path, engine_copy: Path) -> None:
    names = [
        "notes.json",
        "lora.bin",
        "mine.onnx",
        "mine.plan",
        "verify.txt",
        "src/notes.txt",
        "cpu-mine/files.json",
        "cpu-0123456789abcdef",
        *(f"{one.name}/notes.txt" for one in engine_copy.glob("cpu-*")),
    ]
    for name in names:
        (engine_copy / name).parent.mkdir(exist_ok=True)
        (engine_copy / name).write_text("mine")
        before = contents(engine_copy)
        top = name.split("/")[0]
        result = run(export_main, "--model", text_model, "-o", engine_copy, *AS_IS)
        assert_refused(result, "also holds", top, "another --output")
        assert contents(engine_copy) == before
        (engine_copy / name).unlink()


def test_a_build_for_the_cpu_does_not_replace_what_has_its_name(engine_copy: Path) -> None:
    place = place_of(engine_copy, load_manifest(engine_copy))
    place.mkdir(exist_ok=True)
    (place / "files.json").unlink(missing_ok=True)
    (place / "thesis.txt").write_text("thesis")
    assert_refused(run(build_main, "--target", "cpu", engine_copy), str(place), "holds other files")
    assert (place / "thesis.txt").read_text() == "thesis"
    shutil.rmtree(place)
    place.symlink_to(place.name)
    assert_refused(run(build_main, "--target", "cpu", engine_copy), str(place), "holds other files")
    assert place.is_symlink()


def distillation(learner: Path, own_rows: Path, output: Path) -> tuple[object, ...]:
    return (
        "--model",
        learner,
        "--exit-layer",
        1,
        "--data",
        own_rows,
        "-o",
        output,
        *SMALL,
        "--steps",
        2,
        "--save-every",
        1,
    )


def test_a_distillation_keeps_what_is_in_its_directory(
    learner: Path, own_rows: Path, tmp_path: Path
) -> None:
    names = ("engine-0/thesis.txt", "README.md")
    for name in names:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("mine")
    succeed(distill_main, *distillation(learner, own_rows, tmp_path / "out"))
    found = contents(tmp_path / "out")
    assert all(found[name] == b"mine" for name in names)
    assert not [name for name in listing(tmp_path / "out") if files.is_temporary(name)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "checkpoint-500/model.safetensors",
            ("checkpoint-500", "not a checkpoint of eesd-distill"),
        ),
        ("checkpoint-2/notes.txt", ("checkpoint-2", "not a checkpoint of eesd-distill")),
        ("exit_head.safetensors", ("an exit head from another source",)),
    ],
)
def test_checkpoints_and_heads_of_others_are_not_replaced(
    learner: Path, own_rows: Path, tmp_path: Path, name: str, words: tuple[str, ...]
) -> None:
    """transformers' Trainer uses the same names for its checkpoints."""
    (tmp_path / "out" / name).parent.mkdir(parents=True)
    (tmp_path / "out" / name).write_text("mine")
    assert_refused(run(distill_main, *distillation(learner, own_rows, tmp_path / "out")), *words)
    assert (tmp_path / "out" / name).read_text() == "mine"


@pytest.mark.fast
def test_links_in_a_circle_are_refused(text_model: Path, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    ask = ("-p", "hello")
    for command, *options in (
        (export_main, "--model", text_model, "-o", tmp_path / "a"),
        (run_main, *ask, "--engine-dir", tmp_path / "a"),
        (run_main, *ask, "--engine-dir", tmp_path / "a" / "b"),
        (run_main, *ask, "--model", text_model, "--cache-dir", tmp_path / "a"),
        (run_main, *ask, "--model", tmp_path / "a"),
        (cache_main, "list", "--cache-dir", tmp_path / "a"),
        (inspect_main, tmp_path / "a"),
        (doctor_main, "--engine-dir", tmp_path / "a"),
        (bench_main, "--engine-dir", tmp_path / "a"),
        (distill_main, "--model", text_model, "-o", tmp_path / "a"),
        (serve_main, "--engine-dir", tmp_path / "a"),
    ):
        assert_refused(run(command, *options), "/a")
    with pytest.raises(EESDError, match="is not a directory"):
        eesd.load(tmp_path / "a")


@pytest.mark.fast
def test_a_name_that_is_not_utf8_is_refused(text_model: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"bad\xff")
    assert_refused(
        run(export_main, "--model", text_model, "-o", tmp_path / name), "bad", "not UTF-8"
    )
    with pytest.raises(EESDError, match="engine_dir is"):
        eesd.load(tmp_path / name)


@pytest.mark.fast
def test_a_place_that_cannot_be_written_is_refused_before_the_long_work(
    text_model: Path, tmp_path: Path
) -> None:
    assert_refused(
        run(export_main, "--model", text_model, "-o", "/proc/x"),
        "/proc/x cannot be written",
        "another --output",
    )
    assert_refused(
        run(export_main, "--model", text_model, "-o", tmp_path / ("x" * 300)), "File name too long"
    )


@pytest.mark.fast
def test_a_report_replaces_only_its_like(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.md"
    thesis.write_text("thesis")
    assert_refused(run(bench_main, "report", RESULT, "-o", thesis), str(thesis), "did not write it")
    for _ in range(2):
        succeed(bench_main, "report", RESULT, "-o", tmp_path / "report.md")
    assert thesis.read_text() == "thesis"


@pytest.mark.fast
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "generation_config.json", "chat_template.jinja"]
)
def test_a_link_that_leads_nowhere_is_not_taken_for_absent(
    text_model: Path, tmp_path: Path, name: str
) -> None:
    model = shutil.copytree(text_model, tmp_path / "model")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to("/nonexistent/blob")
    result = run(export_main, "--model", model, "-o", tmp_path / "plans", *AS_IS)
    assert_refused(result, name, "a link that leads nowhere", "fetch the model again")


def test_an_export_says_what_its_tokenizer_lacks(text_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(text_model, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"more": 97, "most": 4095}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = succeed(export_main, "--model", model, "-o", tmp_path / "plans", *AS_IS)
    assert "ids up to 4095" in result.stderr and "ids below 97" in result.stderr
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert (
        "has no tokenizer"
        in succeed(export_main, "--model", model, "-o", tmp_path / "none", *AS_IS).stderr
    )


@pytest.mark.fast
def test_a_message_does_not_repeat_thousands_of_characters(
    text_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(text_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"model_type": "x" * 9000, "architectures": ["y" * 9000]})
    )
    for options in (
        ("--model", model),
        ("--model", "x" * 9000),
        ("--model", text_model, "--dtype", "x" * 9000),
    ):
        result = run(export_main, *options, "-o", tmp_path / "plans")
        assert_refused(result)
        assert len(result.stderr) < 1100


def test_a_distillation_without_data_says_what_to_give(learner: Path, tmp_path: Path) -> None:
    model = shutil.copytree(learner, tmp_path / "model")
    add_tokenizer(model, template=None)
    for more in ((), ("--own-rows", 8)):
        result = run(
            distill_main, "--model", model, "--exit-layer", 1, "-o", tmp_path / "out", *more
        )
        assert_refused(result, "no chat template", "--data FILE", "--self-generate FILE")
    assert not (tmp_path / "out").exists()
