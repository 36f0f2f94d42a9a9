"""Tests of ``eesd-run`` with engines, options and prompts that it cannot use. It prints one helpful
line, exits with code 2, and never shows a traceback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file
from support.command import assert_one_line, assert_refused, export_engine, run
from support.engine_dirs import Damage, edit_manifest, garble, recorded, swap_graphs
from support.without_operators import needs_operators

from eesd.common.integrity import sha256_of
from eesd.runtime.cli import main
from eesd.runtime.engines.cpu_build import FILES

pytestmark = pytest.mark.fast

PROMPT = ("-p", "hello", "-n", 3)


def eesd_run(directory: Path, *options: object, stdin: str | bytes = "") -> Result:
    return run(main, "--engine-dir", directory, "--no-stats", *options, stdin=stdin)


def manifest(text: str) -> Damage:
    return lambda directory: (directory / "manifest.json").write_text(text)


def with_value(path: str, value: Any) -> Damage:
    return lambda directory: edit_manifest(directory, path, value)


def lose_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    edit_manifest(directory, "files/tokenizer.json", ...)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, ("is not a directory", "eesd-export")),
        (lambda d: (d / "manifest.json").unlink(), ("has no manifest.json", "eesd-export")),
        (
            lambda d: (d / "manifest.json").rename(d / "config.json"),
            ("is a model, not an engine directory", "--model"),
        ),
        (manifest('{"format_version": 1, "files"'), ("manifest.json is not valid JSON",)),
        (manifest('{"name": "a web app"}'), ("manifest.json is not an EESD manifest",)),
        (manifest("[1, 2]"), ("manifest.json is not an EESD manifest",)),
        (with_value("format_version", 99), ("format version 99", "reads version 1")),
        (lambda d: (d / "weights.bin").unlink(), ("weights.bin is missing",)),
        (lambda d: os.truncate(d / "weights.bin", 1000), ("weights.bin has 1000 bytes",)),
        (lambda d: (d / "draft.onnx").unlink(), ("draft.onnx is missing",)),
        (garble, ("verify.onnx is not the file that was written", "export the model again")),
        (swap_graphs, ("draft.onnx has", "bytes where the manifest says")),
        (with_value("dtype", "float16"), ("damaged", "inputs, outputs or caches")),
        (with_value("files", {"../secret": {"size": 1, "sha256": ""}}), ("damaged",)),
        (lose_tokenizer, ("no tokenizer.json", "token ids")),
    ],
)
def test_a_bad_engine_directory_is_refused(
    engine_copy: Path, damage: Damage, words: tuple[str, ...]
) -> None:
    damage(engine_copy)
    assert_refused(eesd_run(engine_copy, *PROMPT), *words)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "geometry",
            "geometry/vocab_size",
            "geometry/num_layers",
            "geometry/head_dim",
            "exit_head/layer",
            "exit_head/blocks",
        ),
        *("draft_top_k", "max_seq_len", "dtype"),
        *(
            "draft",
            "draft/caches",
            "draft/caches/1",
            "draft/inputs/4",
            "draft/inputs/4/name",
            "draft/outputs/0/shape",
        ),
        *(
            "verify/0/file",
            "verify/0/outputs",
            "verify/0/outputs/0/dtype",
            "files",
            "files/weights.bin",
            "files/weights.bin/size",
        ),
    ],
)
def test_a_damaged_manifest_is_refused(engine_copy: Path, path: str) -> None:
    """A damaged manifest gives one line, and never a wrong binding. (test_fuzz.py makes random
    edits.)"""
    for value in (None, -1, [1], ...):
        shutil.copy(engine_copy / "manifest.json", engine_copy.parent)
        edit_manifest(engine_copy, path, value)
        assert_refused(eesd_run(engine_copy, *PROMPT), str(engine_copy), "export")
        shutil.copy(engine_copy.parent / "manifest.json", engine_copy)


@pytest.mark.parametrize("exported", [(), ("--quantize", "int4")], ids=["float32", "int4"])
def test_logits_that_are_not_finite_choose_no_token(
    text_model: Path, tmp_path: Path, exported: tuple[str, ...]
) -> None:
    model = shutil.copytree(text_model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)
    save_file(weights, model / "model.safetensors")
    directory = export_engine(model, tmp_path / "plans", *exported)
    for options in (
        (),
        ("--temperature", 1),
        ("--temperature", 1, "--sampling", "rejection"),
        ("--repetition-penalty", 1.2),
    ):
        for drafting in ((), ("--no-draft",)):
            assert_refused(
                eesd_run(directory, *PROMPT, *options, *drafting), "not finite", "weights"
            )


def test_a_missing_draft_is_not_overlooked(engine_copy: Path) -> None:
    """Without --no-draft the draft is needed. An incomplete directory is therefore refused, and is
    not used without its draft."""
    (engine_copy / "draft.onnx").unlink()
    assert_refused(eesd_run(engine_copy, *PROMPT, "--no-draft"), "draft.onnx is missing")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--temperature", -1), ("temperature is -1.0", "at least 0 and below 100")),
        (("--temperature", "nan"), ("temperature is nan",)),
        (("--top-p", 0), ("top_p is 0.0", "above 0 and at most 1")),
        (("--top-k", -1), ("top_k is -1",)),
        (("--min-p", 1), ("min_p is 1.0",)),
        (("--repetition-penalty", 0), ("repetition_penalty is 0.0",)),
        (("--seed", 2**63), ("seed is 9223372036854775808",)),
        (
            ("--controller", "magic"),
            ("no controller 'magic'", "beta-ts, calibration-ts, cost-aware-ts, fixed"),
        ),
        (("--controller", "fixed:depth=3"), ("no option 'depth'", "it has k")),
        (("--controller", "fixed:k=many"), ("k=many", "not a number")),
        (("--controller", "beta-ts:discount=2"), ("discount must be above 0 and at most 1",)),
        (("--tree", -1), ("tree is -1", "between 0 and 512")),
        (("--tree", 9), ("tree is 9", "0 to 8")),
        (("--min-tokens", 50), ("min_tokens is 50", "max_new_tokens is 3")),
        (("-n", 0), ("max_new_tokens is 0", "at least 1")),
        (("--threads", 0), ("threads is 0",)),
        (("--stop", ""), ("stop string is empty",)),
        (("--compare", "--no-draft"), ("--compare needs drafting",)),
    ],
)
def test_a_bad_option_is_refused(
    engine: Path, options: tuple[object, ...], words: tuple[str, ...]
) -> None:
    assert_refused(eesd_run(engine, *PROMPT, *options), *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-p", ""), ("prompt is empty",)),
        (("-p", "a" * 512), ("512 tokens", "cache has 512 slots", "--max-seq-len")),
        (("-p", "caf\udce9"), ("not valid Unicode",)),
        (("--prompt-file", "/nowhere/prompt.txt"), ("No such file", "/nowhere/prompt.txt")),
        (("--prompt-file", "/"), ("Is a directory",)),
    ],
)
def test_a_bad_prompt_is_refused(
    engine: Path, options: tuple[object, ...], words: tuple[str, ...]
) -> None:
    assert_refused(eesd_run(engine, *options), *words)


@pytest.mark.parametrize(
    ("stdin", "words"), [(b"", "prompt is empty"), (b"caf\xe9", "stdin is not UTF-8")]
)
def test_a_bad_stdin_is_refused(engine: Path, stdin: bytes, words: str) -> None:
    assert_refused(eesd_run(engine, stdin=stdin), words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", ("has no prompts",)),
        (b"\n \n", ("has no prompts",)),
        (b'"fine"\n{"prompt": ', ("line 2 is not valid JSON",)),
        (b'"fine"\n\n{"text": "x"}', ("line 3", "neither a prompt nor messages")),
        (b"5", ("line 1", "neither a prompt nor messages")),
        (b'{"prompt": ""}', ("prompt is empty",)),
        (b'{"prompt": [1, 97]}', ("token id 97", "0 to 96")),
        (b'{"prompt": [1, -1]}', ("token id -1",)),
        (b'{"prompt": [1.5]}', ("list of token ids",)),
        (b'{"messages": ["hello"]}', ("list of chat messages",)),
        (b'{"prompt": "\\ud800"}', ("not valid Unicode",)),
        (b'"caf\xe9"', ("not UTF-8",)),
    ],
)
def test_bad_json_lines_are_refused(
    engine: Path, tmp_path: Path, text: bytes, words: tuple[str, ...]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(text)
    # Mistakes in the file are found before anything is generated. A prompt that does not suit the
    # model is found only when its turn comes.
    assert_refused(eesd_run(engine, "--prompt-file", file, stdin="not to be read"), *words)


@pytest.mark.parametrize(
    "template", ["{% if", "{{ nothing.at.all }}", "{{ raise_exception('no\nsystem role') }}"]
)
def test_a_template_that_fails_is_one_line(engine_copy: Path, template: str) -> None:
    recorded(lambda d: (d / "chat_template.jinja").write_text(template))(engine_copy)
    assert_refused(eesd_run(engine_copy, "--chat", *PROMPT), "chat template refuses")


@pytest.mark.parametrize(("name", "keep"), [("draft.onnx", 0.0), ("verify.onnx", 0.9)])
def test_a_truncated_graph_is_one_line_of_the_whole_process(
    engine_copy: Path, name: str, keep: float
) -> None:
    """ONNX Runtime logs to the file descriptor, not to Python's stream."""
    data = (engine_copy / name).read_bytes()
    recorded(lambda d: (d / name).write_bytes(data[: int(keep * len(data))]))(engine_copy)
    without = (
        "from pathlib import Path; from eesd.runtime.engines import operators; operators.LIBRARY "
        "= Path('missing.so')"
    )
    refused_by_the_process(engine_copy, without, "cannot load", name, "export again")


@needs_operators()
@pytest.mark.parametrize(("name", "keep"), [("draft.onnx", 0.9), ("verify.onnx", 0.0)])
def test_a_damaged_packed_graph_is_one_line_of_the_whole_process(
    engine_copy: Path, name: str, keep: float
) -> None:
    (path,) = engine_copy.glob(f"cpu-*/{name}")
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))] + b"\xff" * (len(data) - int(keep * len(data))))
    listed = json.loads((path.parent / FILES).read_text())
    listed[name]["sha256"] = sha256_of(path)
    (path.parent / FILES).write_text(json.dumps(listed))
    refused_by_the_process(
        engine_copy, "pass", "cannot load", name, "run: eesd-build --target cpu --force"
    )


def refused_by_the_process(directory: Path, arrange: str, *words: str) -> None:
    code = f"{arrange}; from eesd.runtime.cli import main; main()"
    command = [sys.executable, "-c", code, "--engine-dir", str(directory), *map(str, PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert_one_line(done.stderr, *words)
