"""Whatever lies where commands write, and whatever comes while they do: nothing that they did not make is lost."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from click.testing import Result
from support.command import run
from support.distilling import SMALL

from eesd.bench.cli import main as bench_main
from eesd.common import files
from eesd.distill.cli import main as distill_main
from eesd.export import cache as caches
from eesd.export import prepare
from eesd.export.cache_cli import main as cache_main
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.runtime.cli import main as run_main
from eesd.serve.cli import main as serve_main

CASES = int(os.environ.get("FOREIGN_CASES", "150"))
"""Commands of the property test; some thousand are thorough."""
AS_IS = ("--exit-layer", 1, "--no-check", "--no-pack")
ENTRY = "model-0123456789abcdef"
PLACES = (
    "",
    "plans",
    "plans/cpu-0123456789abcdef",
    "plans/more",
    "out",
    "out/checkpoint-2",
    "out/engine-0",
    "out/own-text",
    "a/b",
)
PLACES += (f"cache/{ENTRY}", "cache/mine-0123456789abcdef", "repository/eesd/1")
NAMES = ("thesis.txt", "manifest.json", "weights.bin", "notes.json", "mine.onnx", "mine.plan", "README.md", "report.md")
NAMES += (
    "exit_head.json",
    "exit_head.safetensors",
    "curves.png",
    "run.json",
    "metrics.jsonl",
    "eesd-cache.json",
    "result.json",
)
TARGETS = (
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
)
TARGETS += ("plans/new", "out/new")


class World:
    """A directory with files of EESD and of somebody else, and what the latter are."""

    def __init__(self, root: Path, engine: Path, random: Random) -> None:
        self.root, self.random = root, random
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
            self.link(root / name, name if name == "loop" else random.choice([*TARGETS, "nowhere", "..", "../.."]))

    def plant(self, path: Path) -> None:
        """Put a file of somebody's where nothing is."""
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
                self.foreign[path.parent.resolve() / path.name] = os.readlink(path)
        except OSError:
            return

    def any_path(self) -> Path:
        """A path of a command: plain, behind a link, or with ".."."""
        path = self.root / self.random.choice(TARGETS)
        return path / self.random.choice(["", "", "", "new/..", "../plans", "link", "link/.."])

    def intrude(self, path: Path) -> None:
        """What somebody does where a command writes ``path`` just then: in it if it is a directory, else beside it."""
        directory = path if path.is_dir() or not path.suffix else path.parent
        if self.random.random() < 0.7:
            self.plant(directory / self.random.choice([name for name in NAMES if name != path.name]))
        else:
            self.link(directory / "link" if directory.exists() else directory, self.random.choice(TARGETS))

    def lost(self) -> list[Path]:
        """What is not in its place as it was."""
        now = {path: os.readlink(path) if path.is_symlink() else contents_of(path) for path in self.foreign}
        return [path for path in self.foreign if now[path] != self.foreign[path]]


def contents_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


@pytest.fixture
def commands(
    text_model: Path, learner: Path, own_rows: Path, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Callable[[Path], Result]]:
    """Each writes, replaces or cleans a path. Slow ones are rare."""
    export = prepare.main.callback
    assert export
    monkeypatch.setattr(prepare, "_run", lambda command: export(command[-1]))  # in this process
    lease = tmp_path / "lease.jsonl"
    lease.write_text(json.dumps({"step": "machine", "status": "ok", "seconds": 1}) + "\n")
    ask = ("-p", "hello", "-n", 2, "--no-stats")
    exit_only = ("--exit-layer", 1, "--steps", 0, "--blocks", 0, "--data", own_rows, *SMALL)

    def on_model(path: Path) -> Result:
        return run(run_main, "--model", text_model, *ask, "--exit-layer", 1, "--cache-dir", path)

    quick: list[Callable[[Path], Result]] = [
        lambda path: run(export_main, "--model", text_model, "-o", path, *AS_IS),
        lambda path: run(export_main, "--model", path, "-o", path, *AS_IS),
        lambda path: run(run_main, "--engine-dir", path, *ask),
        lambda path: run(run_main, "--engine-dir", engine, *ask, "--log-rounds", path),
        lambda path: run(cache_main, "clean", "--all", "--cache-dir", path),
        lambda path: run(bench_main, "report", lease, "-o", path),
        lambda path: run(serve_main, "--engine-dir", engine, "--triton-repo", path),
        lambda path: run(inspect_main, path),
    ]
    slow: list[Callable[[Path], Result]] = [
        on_model,
        lambda path: run(distill_main, "--model", learner, "-o", path, *exit_only),
        lambda path: run(
            distill_main, "--model", learner, "-o", path, *exit_only[:2], *exit_only[6:], "--steps", 2, "--save-every", 1
        ),
    ]
    return 3 * quick + slow


@pytest.fixture
def at_claim(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[Path], None]]]:
    """Functions in this list are called with the path that a command begins to write, or is about to move aside."""
    called: list[Callable[[Path], None]] = []
    claim, rename = files._new_claim, Path.rename

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
    commands: list[Callable[[Path], Result]], engine: Path, tmp_path: Path, at_claim: list[Callable[[Path], None]]
) -> None:
    done = 0
    for case in range(CASES):
        random = Random(case)
        world = World(tmp_path / str(case), engine, random)
        command, path = random.choice(commands), world.any_path()
        left = [random.randrange(1, 6)]

        def intrude(target: Path) -> None:
            left[0] -= 1
            if not left[0] and target.is_relative_to(world.root) and not files.is_temporary(target.name):
                world.intrude(target)

        at_claim[:] = [intrude]
        result = command(path)
        at_claim.clear()
        assert result.exit_code in (0, 2) and isinstance(result.exception, SystemExit | None), (case, path, result.exception)
        assert result.exit_code == 0 or "error: " in result.stderr, (case, path, result.stderr)
        assert not world.lost(), (case, path, world.lost(), result.output)
        done += result.exit_code == 0
        files._delete(world.root)
    assert done > CASES / 5
