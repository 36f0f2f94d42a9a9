"""``eesd-inspect`` shows an engine directory and detects changed files."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.command import assert_one_line, assert_refused, run, succeed

from eesd.export.inspect import BAR_WIDTH, main, memory_bars
from eesd.export.memory import DeviceMemory


def words_of(output: str) -> set[str]:
    return set(output.replace("│", " ").replace(",", " ").split())


def test_summary_shows_geometry_exit_head_and_files(engine: Path) -> None:
    words = words_of(succeed(main, engine).stdout)
    assert {
        "model",
        "(LlamaForCausalLM)",
        "float32",
        "vocabulary",
        "97",
        "(untrained:",
        "slots",
        "512",
    } <= words
    assert {"draft.onnx", "verify.onnx", "weights.bin", "tokenizer.json"} <= words


def test_json_prints_the_manifest(engine: Path) -> None:
    assert succeed(main, engine, "--json").stdout == (engine / "manifest.json").read_text()


def test_verify_detects_a_changed_file(engine_copy: Path) -> None:
    assert succeed(main, engine_copy, "--verify").stdout.endswith("all files are as exported\n")
    result = succeed(main, engine_copy, "--verify", "--json")
    json.loads(result.stdout)
    assert result.stderr == "all files are as exported\n"
    weights = bytearray((engine_copy / "weights.bin").read_bytes())
    weights[100] ^= 1
    (engine_copy / "weights.bin").write_bytes(weights)
    result = run(main, engine_copy, "--verify")
    assert result.exit_code == 2 and "as exported" not in result.stdout
    assert_one_line(result.stderr, "weights.bin was changed")


def test_memory_has_a_bar_for_each_device(engine: Path) -> None:
    [device] = json.loads(succeed(main, engine, "--memory", "--json").stdout)["devices"]
    bar, legend = succeed(main, engine, "--memory").stdout.splitlines()[-2:]
    assert bar.startswith("device 0  █") and bar.endswith(" MB")
    assert legend.split() == ["█", "weights", "▓", "KV", "cache", "░", "buffers"]
    parts = {letter: bar.count(letter) / BAR_WIDTH for letter in "█▓░"}
    assert sum(parts.values()) == 1
    assert parts["▓"] == pytest.approx(device["kv_cache"] / device["total"], abs=1 / BAR_WIDTH)


def test_bars_have_one_scale_and_need_no_blocks() -> None:
    small = DeviceMemory(("a",), (0, 1), 10, 60, 10, 30, 5, 10, 0)
    large = replace(small, kv_cache=130)
    first, second, legend = memory_bars([small, large], 1, blocks=False)
    assert first.count("#") == second.count("#") == round(BAR_WIDTH * 60 / 200)
    assert first.count("=") == pytest.approx(BAR_WIDTH * 30 / 200, abs=1)
    assert legend.split()[:2] == ["#", "weights"]
    assert sum(map(second.count, "#=-")) == BAR_WIDTH


def test_other_directories_are_refused(tmp_path: Path) -> None:
    assert_refused(run(main, tmp_path), "has no manifest.json")
    assert_refused(run(main, tmp_path / "nowhere"), "is not a directory")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--memory", "--predict", "h200"], "--memory and --predict"),
        (["--threads", 2], "--threads are for --exact"),
        (["--backend", "torch"], "--threads are for --exact"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    engine: Path, options: list[object], words: str
) -> None:
    assert_refused(run(main, engine, *options), words)


def test_a_model_that_is_not_there_is_refused_before_imports() -> None:
    code = (
        "import sys; from eesd.export.inspect import main\n"
        "try: main()\n"
        "finally: print({'onnx', 'torch', 'eesd.export.outline'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code, "--model", "TYPO", "--memory"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "set()\n")
    assert_one_line(done.stderr, "TYPO is neither a directory")


def test_names_that_look_like_markup_are_printed_literally(engine: Path, tmp_path: Path) -> None:
    directory = tmp_path / "[/red]:smile:"
    shutil.copytree(engine, directory)
    assert "[/red]:smile:" in succeed(main, directory).stdout.replace("\n", "")
