"""Tests of the option ``--model``. The first start exports the model into a cache and runs it.
Later starts run the cached engines. Also ``eesd-cache``."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import httpx2
import pytest
from safetensors.numpy import load_file, save_file
from support.command import (
    assert_one_line,
    assert_refused,
    contents,
    export_engine,
    listing,
    notice,
    run,
    succeed,
)
from support.killing import kill_command
from support.no_torch import BLOCK, HEAVY, blocker

from eesd.common.turns import turn
from eesd.export import cache as caches
from eesd.export import make, prepare
from eesd.export.cache_cli import main as cache_main
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.runtime.cli import main as run_main
from eesd.runtime.engine_options import EXPORT_OPTIONS
from eesd.serve.cli import main as serve_main

ASK = ("-p", "hello", "-n", 12, "--no-stats", "--exit-layer", 1)
Shared = Callable[[str, Callable[[Path], object]], Path]
KEY = {"exit_head": None, "exit_layer": 1, "dtype": None, "quantize": None, "max_seq_len": None}
"""The options of ``ASK`` that belong to the export."""


RUN = "from eesd.runtime.cli import main; main()"
EXPORT = "from eesd.export.prepare import main; main()"


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a command runs in this process, its export runs in this process as well."""
    export = prepare.main.callback
    assert export
    monkeypatch.setattr(prepare, "_run", lambda command: export(command[-1]))


@pytest.fixture
def model(text_model: Path, tmp_path: Path) -> Path:
    """A model that the test may change."""
    return shutil.copytree(text_model, tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EESD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def first(shared: Shared, text_model: Path) -> Path:
    """A directory with the results of a first start (``cache``, ``stdout`` and ``stderr``). The
    start runs in a separate process, as for a user."""

    def fill(path: Path) -> None:
        with python(RUN, "--model", text_model, *ASK, "--cache-dir", path / "cache") as process:
            stdout, stderr = process.communicate()
        assert process.returncode == 0, stderr
        (path / "stdout").write_text(stdout)
        (path / "stderr").write_text(stderr)

    return shared("one-command", fill)


@pytest.fixture
def place(first: Path, cache: Path) -> Path:
    """The engine directory in the cache after a first start."""
    shutil.copytree(first / "cache", cache)
    (found,) = cache.iterdir()
    return found


def python(code: str, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def request(cache: Path, model: Path) -> str:
    """Returns the arguments of the process that exports."""
    place = caches.place_of(cache, str(model), model, KEY | {"packed": True}, None)
    return prepare.command_of(place, str(model), KEY, packed=True)[-1]


def test_the_first_start_exports_and_later_ones_only_run(
    first: Path, place: Path, model: Path, cache: Path, tmp_path: Path
) -> None:
    plans = export_engine(model, tmp_path / "plans")
    expected = succeed(run_main, "--engine-dir", plans, *ASK[:-2]).stdout
    assert (first / "stdout").read_text() == expected
    assert re.search(
        r"(?s)^Exporting .+^exported in \d+ s", (first / "stderr").read_text(), re.MULTILINE
    )
    assert re.fullmatch("model-[0-9a-f]{16}", place.name)
    assert (place / "tokenizer.json").read_bytes() == (plans / "tokenizer.json").read_bytes()
    [packed] = place.glob("cpu-*/weights.bin")
    [built] = plans.glob("cpu-*/weights.bin")
    assert packed.read_bytes() == built.read_bytes()
    assert not (place / "weights.bin").exists()  # the cache holds a model once
    before = contents(cache)
    # torch and the packages for exporting cannot be imported.
    with python(BLOCK + RUN, "--model", model, *ASK) as second:
        stdout, stderr = second.communicate()
    assert (second.returncode, stdout, stderr) == (0, expected, notice())
    assert contents(cache) == before


def test_a_first_start_needs_neither_torch_nor_transformers(
    first: Path, model: Path, tmp_path: Path
) -> None:
    """The separate process that exports does not need these packages either."""
    (tmp_path / "sitecustomize.py").write_text(blocker(*HEAVY))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", RUN, "--model", model, *ASK, "--cache-dir", tmp_path / "cache"]
    done = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, (first / "stdout").read_text()), done.stderr
    assert "\nchecked: " in done.stderr


def test_stdout_holds_only_what_was_asked_for(first: Path, model: Path, cache: Path) -> None:
    answer = json.loads(succeed(run_main, "--model", model, *ASK, "--json").stdout)
    assert answer["text"] + "\n" == (first / "stdout").read_text()
    compared = succeed(run_main, "--model", model, *ASK, "--compare", "--max-seq-len", 64)
    assert answer["text"] in compared.stdout and "tokens are equal (12)" in compared.stderr
    assert compared.stdout.count("\n") == 1 and len(listing(cache)) == 2


def test_where_the_cache_is(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("EESD_CACHE_DIR", "")
    succeed(run_main, "--model", model, *ASK)
    (first,) = (tmp_path / "xdg" / "eesd").iterdir()
    monkeypatch.setenv("EESD_CACHE_DIR", str(tmp_path / "variable"))
    shutil.copytree(first.parent, tmp_path / "variable")
    shutil.copytree(first.parent, tmp_path / "option")
    shutil.rmtree(tmp_path / "xdg")
    assert "Exporting" not in succeed(run_main, "--model", model, *ASK).stderr
    shutil.rmtree(tmp_path / "variable")
    assert (
        "Exporting"
        not in succeed(run_main, "--model", model, *ASK, "--cache-dir", tmp_path / "option").stderr
    )
    assert listing(tmp_path) == ["model", "option"]


def edit_json(file: Path) -> None:
    file.write_text(file.read_text().replace("{", "{ ", 1))


CHANGES: list[Callable[[Path], object]] = [
    lambda model: edit_json(model / "config.json"),
    lambda model: edit_json(model / "tokenizer.json"),
    lambda model: (model / "generation_config.json").write_text("{}"),
    lambda model: (model / "chat_template.jinja").write_text("{{ messages }}"),
    lambda model: (model / "exit_head.json").write_text("{}"),
]


def place_of(model: Path, head: Path | None = None, **options: object) -> str:
    return caches.place_of(Path("/cache"), str(model), model, KEY | options, head).name


def test_a_changed_model_is_another_one(model: Path) -> None:
    found = [place_of(model)]
    (model / "README.md").write_text("Nothing that an export reads.")
    assert place_of(model) == found[0]
    for change in CHANGES:
        change(model)
        found.append(place_of(model))
    assert len({*found}) == 1 + len(CHANGES)


@pytest.mark.parametrize("small", [1 << 26, 64])
def test_changed_weights_are_another_model(
    model: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    """Samples miss most bytes of a large file, but its modification time changes."""
    monkeypatch.setattr(caches, "_SMALL", small)
    weights = model / "model.safetensors"
    before = place_of(model)
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    assert place_of(model) != before
    after = place_of(model)
    os.utime(weights, ns=(0, 0))
    assert (place_of(model) == after) == (small > 64)


def test_options_and_versions_are_part_of_the_key(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {place_of(model), place_of(model, dtype="float16"), place_of(model, max_seq_len=64)}
    head = tmp_path / "head"
    head.mkdir()
    (head / "exit_head.json").write_text("{}")
    found.add(place_of(model, head))
    (head / "exit_head.safetensors").write_text("weights")
    found.add(place_of(model, head))
    monkeypatch.setattr("eesd.__version__", "9.9.9")
    found.add(place_of(model))
    monkeypatch.setattr(caches, "FORMAT_VERSION", 999)
    found.add(place_of(model))
    assert len(found) == 7


def test_names_are_readable(tmp_path: Path) -> None:
    file = tmp_path / "some model.Q4_0.gguf"
    file.write_text("GGUF")
    assert caches.place_of(tmp_path, str(file), file, {}, None).name.startswith("some-model.Q4_0-")
    fetched = tmp_path / "snapshots" / "0123abcd"
    fetched.mkdir(parents=True)
    assert caches.place_of(tmp_path, "org/Model-8B", fetched, {}, None).name.startswith("Model-8B-")
    assert caches.place_of(tmp_path, "org/..", fetched, {}, None).name.startswith("model-")


def test_two_that_start_together_export_once(first: Path, model: Path, cache: Path) -> None:
    cache.mkdir()
    held = "import sys, eesd.export.cache as c; m = c.mark\n"
    held += (
        "def mark(*a): print('complete', file=sys.stderr, flush=True); sys.stdin.readline(); "
        "m(*a)\n"
    )
    held += f"c.mark = mark; {EXPORT}"
    with python(held, request(cache, model)) as exporting:
        assert exporting.stderr and exporting.stdin
        assert any(line == "complete\n" for line in iter(exporting.stderr.readline, ""))
        with python(RUN, "--model", model, *ASK) as waiting:
            assert waiting.stderr
            assert waiting.stderr.readline().startswith(
                notice() + f"Another process exports {model}"
            )
            exporting.stdin.write("\n")
            exporting.stdin.flush()
            exporting.communicate()
            answer = waiting.communicate()
    assert (exporting.returncode, waiting.returncode) == (0, 0)
    assert answer == ((first / "stdout").read_text(), notice())
    assert len(listing(cache)) == 1


MOMENTS = {
    "before its name": "import eesd.export.cache as c; c.mark = kill",
    "packing": "import eesd.export.engine_dir as e; e.write_build = kill",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_start_after_a_killed_one(model: Path, cache: Path, moment: str) -> None:
    cache.mkdir()
    kill_command("eesd.export.prepare", MOMENTS[moment], request(cache, model))
    assert any(name.startswith(".") for name in listing(cache))
    after = succeed(run_main, "--model", model, *ASK)
    assert "Exporting" in after.stderr
    assert len([name for name in listing(cache) if not name.startswith(".")]) == 1
    assert not any(name.startswith(".") for name in listing(cache))
    assert succeed(run_main, "--model", model, *ASK).stdout == after.stdout


def test_what_was_damaged_is_exported_again(model: Path, place: Path) -> None:
    [build] = place.glob("cpu-*")
    weights = f"{build.name}/weights.bin"
    before = (place / weights).read_bytes()
    for damage in (weights, "manifest.json"):
        (place / damage).write_bytes((place / damage).read_bytes()[:-5])
        assert "Exporting" in succeed(run_main, "--model", model, *ASK).stderr
        assert "Exporting" not in succeed(run_main, "--model", model, *ASK).stderr
        assert (place / weights).read_bytes() == before
    (place / "manifest.json").unlink()
    (place / "notes.txt").write_text("mine")
    assert_refused(run(run_main, "--model", model, *ASK), str(place), "notes.txt", "move it away")
    assert (place / "notes.txt").read_text() == "mine"


def test_weights_of_another_model_are_exported_again(model: Path, place: Path) -> None:
    """Two models of the same shape have the same graphs, so their builds have the same name."""
    weights = load_file(model / "model.safetensors")
    other = {name: -values for name, values in weights.items()}
    save_file(other, model / "model.safetensors", {"format": "pt"})
    [build] = place.glob("cpu-*")
    before = contents(build)
    succeed(run_main, "--model", model, *ASK)
    [its] = set(place.parent.glob(f"model-*/{build.name}")) - {build}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    shutil.copytree(its, build, dirs_exist_ok=True)
    assert contents(build) != before
    for command in (run_main, "--engine-dir", place, *ASK[:-2]), (inspect_main, place, "--verify"):
        refused = run(*command)
        assert refused.exit_code == 2
        assert_one_line(
            refused.stderr, str(build), "another model", f"eesd-cache clean {place.name}"
        )
    assert "Exporting" in succeed(run_main, "--model", model, *ASK).stderr
    assert contents(build) == before


def test_a_model_that_changes_while_it_is_exported(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(*_: object) -> list[str]:
        edit_json(model / "config.json")
        return []

    monkeypatch.setattr(make, "_check_quickly", edit)
    result = run(run_main, "--model", model, *ASK)
    assert result.exit_code == 2 and result.stdout == ""
    assert_one_line(result.stderr.splitlines(keepends=True)[-1], "changed while it was exported")
    assert listing(cache) == []


def test_a_server_of_a_model(model: Path, place: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "eesd.serve.cli",
        "--model",
        str(model),
        "--exit-layer",
        "1",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            log = []
            for line in iter(process.stderr.readline, ""):
                log.append(line)
                if found := re.search(r"on (http://[\d.:]+)", line):
                    break
            assert found, log
            body = {"prompt": "hello", "max_tokens": 12}
            answer = httpx2.post(f"{found[1]}/v1/completions", json=body, timeout=60).json()
        finally:
            process.kill()
    alone = json.loads(succeed(run_main, "--engine-dir", place, *ASK[:-2], "--json").stdout)
    assert answer["choices"][0]["text"] == alone["text"]
    assert not any("Exporting" in line for line in log)


REFUSED = {
    "nothing": ((), ("no model", "--model", "--engine-dir")),
    "both": (("--model", "{model}", "--engine-dir", "plans"), ("one of them",)),
    "an export's option": (("--engine-dir", "plans", "--dtype", "float32"), ("--dtype", "--model")),
    "an option of the cache": (
        ("--engine-dir", "plans", "--cache-dir", "cache"),
        ("--cache-dir needs --model",),
    ),
    "no such file": (("--model", "missing.gguf"), ("no file missing.gguf",)),
    "no such model": (("--model", "nonsense"), ("nonsense", "neither a directory")),
    "no model": (("--model", "{empty}"), ("{empty}", "config.json")),
    "no such head": (("--model", "{model}", "--exit-head", "./missing"), ("missing",)),
    "a cache that is a file": (
        ("--model", "{model}", "--exit-layer", "1", "--cache-dir", "{model}/config.json"),
        ("config.json",),
    ),
}


@pytest.mark.parametrize("command", [run_main, serve_main], ids=["run", "serve"])
@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_sentence(
    case: str, command: click.Command, text_model: Path, tmp_path: Path
) -> None:
    arguments, words = REFUSED[case]
    names = {"model": text_model, "empty": tmp_path}
    ask = ("-p", "hello") if command is run_main else ("--port", "0")
    result = run(
        command,
        "--cache-dir",
        tmp_path / "cache",
        *(text.format(**names) for text in arguments),
        *ask,
    )
    assert result.exit_code == 2 and result.stdout == "", result.output
    said = result.stderr.splitlines(keepends=True)
    assert_one_line(said[-1], *(word.format(**names) for word in words))
    assert not [
        line
        for line in said[:-1]
        if not line.endswith("...\n") and not line.startswith("Exporting ")
    ]


@pytest.mark.parametrize("what", ["export", "fetch"])
def test_a_missing_package_is_named(what: str, model: Path, cache: Path) -> None:
    cache.mkdir()
    command = (
        (EXPORT, request(cache, model)) if what == "export" else (RUN, "--model", "org/model", *ASK)
    )
    with python(BLOCK + command[0], *command[1:]) as done:
        stdout, stderr = done.communicate()
    assert (done.returncode, stdout) == (2, "")
    assert_one_line(stderr.splitlines(keepends=True)[-1], "needs", "[export]'")
    assert listing(cache) == []


def test_the_options_are_those_of_export() -> None:
    def types(command: click.Command) -> dict[str, object]:
        return {
            str(one.name): one.type.to_info_dict()
            for one in command.params
            if one.name in EXPORT_OPTIONS
        }

    assert types(run_main) == types(serve_main) == types(export_main) and len(
        types(run_main)
    ) == len(EXPORT_OPTIONS)


def test_the_cache_is_listed_and_cleaned(model: Path, place: Path, cache: Path) -> None:
    listed = succeed(cache_main, "list").stdout
    assert (
        place.name in listed
        and f"{os.sep}model --exit-layer 1\n" in listed
        and f"{cache}: 1 directory" in listed
    )
    assert_refused(run(cache_main, "clean"), "--all", "--older-than")
    for command in ("list",), ("clean", "--all"):
        result = run(cache_main, *command, "--cache-dir", model / "config.json")
        assert_refused(result, "config.json is not a directory")
    assert_refused(run(cache_main, "clean", place.name, "--all"), "exactly one")
    assert_refused(run(cache_main, "clean", "other"), "no directory other", "eesd-cache list")
    assert_refused(run(cache_main, "clean", f"../cache/{place.name}"), "no directory")
    assert "removed 0" in succeed(cache_main, "clean", "--older-than", 1).stdout
    os.utime(place / caches.MARK_FILE, (0, 0))
    succeed(run_main, "--model", model, *ASK)  # a use
    assert "removed 0" in succeed(cache_main, "clean", "--older-than", 1).stdout
    with turn(place, None) as mine:
        assert mine
        assert "is kept" in succeed(cache_main, "clean", "--all").stderr
    os.utime(place / caches.MARK_FILE, (0, 0))
    assert "removed 1 directory" in succeed(cache_main, "clean", "--older-than", 1).stdout
    assert listing(cache) == []
    assert "0 directories" in succeed(cache_main, "list", "--cache-dir", cache / "nowhere").stdout


def test_only_what_a_command_made_is_removed(place: Path, cache: Path, tmp_path: Path) -> None:
    copy = cache / f"{place.name[:-16]}{'0' * 16}"
    shutil.copytree(place, copy)  # the copy's mark has another name
    unmarked = cache / f"unmarked-{'1' * 16}"
    shutil.copytree(place, unmarked, ignore=shutil.ignore_patterns(caches.MARK_FILE))
    moved = place.rename(tmp_path / place.name)
    place.symlink_to(moved)
    (cache / "notes.txt").write_text("mine")
    linked = cache / f"linked-{'2' * 16}"
    linked.mkdir()
    (linked / caches.MARK_FILE).symlink_to(moved / caches.MARK_FILE)
    before = contents(tmp_path)
    assert "removed 0" in succeed(cache_main, "clean", "--all").stdout
    assert contents(tmp_path) == before and place.is_symlink()


@pytest.mark.parametrize("kind", ["file", "directory", "link", "link to a directory"])
def test_a_directory_with_something_else_is_kept(place: Path, tmp_path: Path, kind: str) -> None:
    other = place / "other"
    own = tmp_path / "own"
    own.mkdir()
    (own / "file").write_text("mine")
    if kind == "file":
        other.write_text("mine")
    elif kind == "directory":
        other.mkdir()
    else:
        target = own / "file" if kind == "link" else own
        other = place / ("weights.bin" if kind == "link" else f"cpu-{'0' * 16}")
        other.unlink(missing_ok=True)
        other.symlink_to(target)
    before = contents(tmp_path)
    result = succeed(cache_main, "clean", "--all")
    assert "removed 0" in result.stdout and f"holds {other.name}" in " ".join(result.stderr.split())
    assert contents(tmp_path) == before
    if other.is_dir() and not other.is_symlink():
        other.rmdir()
    else:
        other.unlink()
    assert "removed 1" in succeed(cache_main, "clean", "--all").stdout
    assert (own / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"name": 1}', '{"name": "{name}", "made_by": "me", "files": ["weights.bin"]}'],
)
def test_a_damaged_mark_is_no_mark(place: Path, text: str) -> None:
    (place / caches.MARK_FILE).write_text(text.replace("{name}", place.name))
    assert "0 directories" in succeed(cache_main, "list").stdout
    succeed(cache_main, "clean", "--all")
    assert (place / "verify.onnx").exists()
