"""Tests that kill a command with ``kill -9`` at any moment. The next run finds the leftovers,
removes or restores them, and changes nothing else."""

import errno
import fcntl
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command import assert_refused, contents, listing, run, slow_but, succeed
from support.distilling import SMALL
from support.killing import hold, kill_command, kill_writer, killed_at_line

from eesd.common import files
from eesd.common.files import (
    directory_written_whole,
    remove_leftovers,
    temporary_beside,
    written_whole,
)
from eesd.distill.cli import main as distill_main
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.runtime.cli import main as run_main

SOMEBODYS = [
    ".hidden",
    ".plans-1234",
    ".plans.eesd-0123.new",
    ".plans.eesd-0123456789abcdef.neu",
    "plans.eesd-0123456789abcdef.new",
]
"""Foreign file names, some of them similar to ours."""


@pytest.fixture
def somebodys(tmp_path: Path) -> list[str]:
    for name in SOMEBODYS:
        (tmp_path / name).write_text("mine")
    return sorted(SOMEBODYS)


def write_file(target: Path) -> None:
    with written_whole(target) as temporary:
        temporary.write_text("new")


def write_directory(target: Path) -> None:
    with directory_written_whole(target, lambda _: "") as directory:
        (directory / "weights.bin").write_bytes(b"new" * 100_000)
        (directory / "manifest.json").write_text("new")


def text_of(target: Path) -> str | None:
    """Returns ``old`` or ``new``, or None if the target does not exist. Fails if the target is
    incomplete."""
    if not target.exists():
        return None
    if target.is_file():
        return target.read_text()
    found = contents(target)
    if found.keys() == {"manifest.json", "weights.bin"}:
        assert found == {"manifest.json": b"new", "weights.bin": b"new" * 100_000}
        return "new"
    assert found == {"manifest.json": b"old"}
    return "old"


@pytest.mark.fast
@pytest.mark.parametrize("write", [write_file, write_directory])
@pytest.mark.parametrize("replaces", [False, True])
def test_killed_at_any_line(
    tmp_path: Path,
    somebodys: list[str],
    write: Callable[[Path], None],
    replaces: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = tmp_path / "plans"
    moments = 0
    moved_aside = 0
    while True:
        files._delete(target)
        if replaces and write is write_file:
            target.write_text("old")
        elif replaces:
            target.mkdir()
            (target / "manifest.json").write_text("old")
        if not killed_at_line(moments, files.__file__, lambda: write(target)):
            break
        moments += 1
        was_aside = replaces and text_of(target) is None
        moved_aside += was_aside
        caplog.clear()
        remove_leftovers(tmp_path, "plans")
        assert text_of(target) in (("old", "new") if replaces else (None, "new"))
        assert listing(tmp_path) == sorted([*somebodys, *["plans"] * target.exists()])
        assert (
            all("killed run" in message for message in caplog.messages)
            and len(caplog.messages) <= 1 + was_aside
        )
        assert not was_aside or f"Restored {target}" in caplog.text
    assert moments > 20 and text_of(target) == "new"
    assert bool(moved_aside) == (replaces and write is write_directory)


@pytest.mark.fast
def test_the_next_writer_says_what_it_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kill_writer(tmp_path / "state.json")
    write_file(tmp_path / "state.json")
    [message] = caplog.messages
    assert message == f"Removed files that a killed run left next to {tmp_path / 'state.json'}."
    assert listing(tmp_path) == ["state.json"]


@pytest.mark.fast
def test_what_a_living_process_writes_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = hold(tmp_path / "state.json")
    for _ in range(3):
        write_file(tmp_path / "state.json")
        remove_leftovers(tmp_path)
    assert len(listing(tmp_path)) == 3 and not caplog.messages
    process.communicate()
    assert process.returncode == 0 and (tmp_path / "state.json").read_text() == "whole"
    assert listing(tmp_path) == ["state.json"]


@pytest.mark.fast
def test_many_writers_and_sweepers_do_not_harm_each_other(tmp_path: Path) -> None:
    def work() -> None:
        for _ in range(100):
            remove_leftovers(tmp_path)
            write_file(tmp_path / "state.json")

    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            try:
                work()
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    assert listing(tmp_path) == ["state.json"]


def forget_the_machine(lock: Path) -> None:
    lock.write_text(re.sub(r"\n.*\n.*\n", "\nelsewhere\n0000\n", lock.read_text(), count=1))


@pytest.mark.fast
@pytest.mark.parametrize(
    "doubt", ["machine", "no lock", "no locks", "not ours", "a link", "two directories"]
)
def test_in_doubt_it_is_named_and_kept(
    tmp_path: Path, doubt: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File locks may be unsupported, or local to a machine. A lock file may be deleted, or may
    belong to another program."""
    kill_writer(tmp_path / "plans")
    (new,) = tmp_path.glob(".*.new")
    (lock,) = tmp_path.glob(".*.lock")
    if doubt == "machine":
        forget_the_machine(lock)
    elif doubt == "no lock":
        lock.unlink()
    elif doubt == "not ours":
        lock.write_text("hello")
    elif doubt == "a link":
        (tmp_path / "other").write_text(lock.read_text())
        lock.unlink()
        lock.symlink_to(tmp_path / "other")
    elif doubt == "two directories":
        # The run was killed between the renames; then another program made a directory with this
        # name.
        new.with_suffix(".old").mkdir()
        (tmp_path / "plans").mkdir()
    else:

        def unsupported(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", unsupported)
    before = listing(tmp_path)
    remove_leftovers(tmp_path)
    assert listing(tmp_path) == before
    assert len(caplog.messages) == 1 and str(new) in caplog.text and "delete it" in caplog.text
    with temporary_beside(tmp_path / "plans") as temporary:  # others can still write
        temporary.write_text("x")
    assert listing(tmp_path) == before


@pytest.mark.fast
def test_a_machine_that_started_again_is_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_writer(tmp_path / "plans")
    monkeypatch.setattr(files, "_boot_id", lambda: "another")
    remove_leftovers(tmp_path)
    assert listing(tmp_path) == []


@pytest.mark.fast
def test_a_container_with_another_host_name_on_this_machine_is_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_writer(tmp_path / "plans")
    if not files._boot_id():
        pytest.skip("this system has no boot id")
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    remove_leftovers(tmp_path)
    assert listing(tmp_path) == []


EXPORT_MOMENTS = {
    "weights": "import eesd.export.weights as w; w._bytes_of = kill",
    "parity": "import onnxruntime as o; o.InferenceSession = kill",
    "last": "import eesd.common.files as f; f._delete = kill",
}


@pytest.mark.parametrize("moment", slow_but([*EXPORT_MOMENTS], "weights", "last"))
def test_an_export_after_a_killed_one(
    text_model: Path, tmp_path: Path, somebodys: list[str], moment: str
) -> None:
    options = ("--model", text_model, "--exit-layer", 1, "-o", tmp_path / "plans")
    check = "--check" if moment == "parity" else "--no-check"
    kill_command("eesd.export.cli", EXPORT_MOMENTS[moment], *options, check)
    assert len(listing(tmp_path)) > len(somebodys)
    succeed(export_main, *options)
    assert listing(tmp_path) == sorted([*somebodys, "plans"])
    succeed(inspect_main, tmp_path / "plans", "--verify")


AS_IS = ("--no-check", "--no-pack")
"""With these options, an export makes no other renames."""
BETWEEN = (
    "import pathlib; r = pathlib.Path.rename; c = iter([r, kill]); pathlib.Path.rename = lambda "
    "*a: next(c)(*a)"
)


def test_a_directory_that_was_moved_aside_comes_back(
    text_model: Path, engine_copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a kill between the two renames of a replacement, a run reports the place of the
    directory, and the next export puts it back."""
    before = contents(engine_copy)
    kill_command(
        "eesd.export.cli",
        BETWEEN,
        "--model",
        text_model,
        "--exit-layer",
        1,
        "-o",
        engine_copy,
        *AS_IS,
    )
    assert not engine_copy.exists()
    [aside] = engine_copy.parent.glob(".*.old")
    assert_refused(
        run(run_main, "--engine-dir", engine_copy, "-p", "hello"),
        f"was moved to {aside}",
        "export again",
    )
    # This export fails, so the old directory remains.
    assert (
        run(export_main, "--model", text_model, "-o", engine_copy, "--exit-layer", 99).exit_code
        == 2
    )
    assert contents(engine_copy) == before
    assert f"Restored {engine_copy}" in caplog.text
    assert listing(engine_copy.parent) == ["plans"]


@pytest.mark.parametrize("call", slow_but([1, 2, 3, 4], 3))
def test_a_distillation_continues_after_a_killed_one(
    learner: Path, own_rows: Path, tmp_path: Path, call: int
) -> None:
    options = (
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
    calls = f"import safetensors.torch as s; f = s.save_file; c = iter([f] * {call - 1} + [kill])"
    kill_command("eesd.distill.cli", f"{calls}; s.save_file = lambda *a: next(c)(*a)", *options)
    hidden = [path for path in (tmp_path / "out").rglob(".*") if files.is_temporary(path.name)]
    assert hidden
    succeed(distill_main, *options)
    assert not [path for path in (tmp_path / "out").rglob("*") if files.is_temporary(path.name)]
    assert (tmp_path / "out" / "checkpoint-4").is_dir()


def test_an_export_waits_for_a_running_build(text_model: Path, engine_copy: Path) -> None:
    process = hold(engine_copy / "draft.plan")
    result = run(export_main, "--model", text_model, "-o", engine_copy, "--exit-layer", 1)
    assert result.exit_code == 2 and "another process is writing into it" in result.stderr
    process.communicate()
