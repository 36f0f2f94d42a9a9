"""Tests that any content of a file or command line either works or is refused in one sentence.

``make test`` tries a few cases of each kind, and ``make test-slow`` tries many.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click import Command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import gguf_files
from support.command import assert_one_line, export_engine, run, succeed
from support.eagle_heads import LAYOUTS, write_head
from support.engine_dirs import trained_head
from support.family_grid import OPTIONS as FAMILY_OPTIONS
from support.family_grid import family_cases
from support.fuzz import ODD, damaged_json
from transformers import AutoConfig

import eesd
from eesd.bench.measure.results import Result as BenchResult
from eesd.bench.measure.tasks import load_tasks
from eesd.common.errors import EESDError
from eesd.common.manifest import load_manifest
from eesd.common.weights import weight_bytes
from eesd.controllers import CONTROLLERS
from eesd.export.inspect import main as inspect_main
from eesd.model.checkpoint import Checkpoint
from eesd.model.config import load_config
from eesd.model.eagle_file import read_eagle
from eesd.model.families import FAMILIES
from eesd.model.loading import load_exit_head
from eesd.runtime.cli import main, read_prompts
from eesd.runtime.llm import LLM

FEW = 150
MANY = int(os.environ.get("FUZZ_CASES", "1500"))
"""The number of cases of each kind. FUZZ_CASES=15000 takes most of an hour."""
SLOW = settings(max_examples=MANY, deadline=None, suppress_health_check=list(HealthCheck))
QUICK = settings(max_examples=FEW, deadline=None, suppress_health_check=list(HealthCheck))


def check(strategy: st.SearchStrategy[Any], use: Callable[[Any], object], limits: settings) -> None:
    """Check that each case works, or raises an EESDError of one line."""

    @limits
    @given(case=strategy)
    def cases(case: Any) -> None:
        try:
            use(case)
        except EESDError as error:
            message = str(error)
            assert message.endswith(".") and "\n" not in message and len(message) < 1200, message

    cases()


both = pytest.mark.parametrize(
    "limits", [pytest.param(QUICK, id="few"), pytest.param(SLOW, id="many", marks=pytest.mark.slow)]
)
"""The settings have few cases for ``make test``, and many cases for ``make test-slow``."""


@both
def test_config(family_dir: Callable[[str], Path], tmp_path: Path, limits: settings) -> None:
    directories = [
        shutil.copytree(family_dir(name), tmp_path / name)
        for name in ("llama3", "qwen3", "mistral-window", "qwen2")
    ]
    documents = [json.loads((directory / "config.json").read_text()) for directory in directories]
    documents[3]["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
    }

    def use(case: tuple[int, str]) -> None:
        directory = directories[case[0]]
        (directory / "config.json").write_text(case[1], errors="surrogatepass")
        config = load_config(directory)
        assert config.geometry.head_dim % 2 == 0
        Checkpoint(directory)

    check(
        st.one_of(*(st.tuples(st.just(i), damaged_json(d)) for i, d in enumerate(documents))),
        use,
        limits,
    )


@both
def test_config_of_a_family(tmp_path: Path, limits: settings) -> None:
    cases = [case for kind in FAMILY_OPTIONS for case in family_cases(kind, 2, seed=4)]
    documents = [AutoConfig.for_model(case.model_type, **case.options).to_dict() for case in cases]
    for case, document in zip(cases, documents, strict=True):
        document["architectures"] = [FAMILIES[case.model_type].architecture]

    def use(text: str) -> None:
        (tmp_path / "config.json").write_text(text, errors="surrogatepass")
        load_config(tmp_path)

    check(st.one_of(*map(damaged_json, documents)), use, limits)


@both
def test_shard_index(family_dir: Callable[[str], Path], tmp_path: Path, limits: settings) -> None:
    directory = shutil.copytree(family_dir("codellama"), tmp_path / "model")
    path = directory / "model.safetensors.index.json"

    def use(text: str) -> None:
        path.write_text(text, errors="surrogatepass")
        Checkpoint(directory)

    check(damaged_json(json.loads(path.read_text())), use, limits)


@both
def test_exit_head(text_model: Path, tmp_path: Path, limits: settings) -> None:
    directory = trained_head(text_model, tmp_path / "head", blocks=1, own_lm_head=False)
    checkpoint = Checkpoint(text_model)
    path = directory / "exit_head.json"
    document = json.loads(path.read_text())
    document["calibration"] = {"accept": [0.1] * 5, "following": [0.2] * 5}
    document["calibration"] |= dict.fromkeys(("shift", "slope", "request", "wander", "drift"), 0.3)

    def use(text: str) -> None:
        path.write_text(text, errors="surrogatepass")
        assert load_exit_head(checkpoint, directory).exit_config.layer in (1, 2)

    check(damaged_json(document), use, limits)


@both
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eagle_head(text_model: Path, tmp_path: Path, limits: settings, layout: str) -> None:
    checkpoint = Checkpoint(text_model)
    directory = tmp_path / "head"
    write_head(
        directory, json.loads((text_model / "config.json").read_text()), layout, draft_vocab=20
    )
    path = directory / "config.json"
    document = json.loads(path.read_text())

    def use(text: str) -> None:
        path.write_text(text, errors="surrogatepass")
        config, tensors, ids = read_eagle(checkpoint, directory)
        assert config.eagle is not None and tensors and ids is not None

    check(damaged_json(document), use, limits)


@both
def test_manifest(engine_copy: Path, limits: settings) -> None:
    """If a directory is accepted, it runs and gives the greedy tokens of the undamaged directory.
    Its sampling options are ignored, because the edits may change them."""
    path = engine_copy / "manifest.json"
    expected = (
        eesd.load(engine_copy).generate([1, 40, 50], max_new_tokens=3, ignore_eos=True).tokens
    )

    def use(text: str) -> None:
        path.write_text(text, errors="surrogatepass")
        load_manifest(engine_copy)
        llm = eesd.load(engine_copy, "ort", threads=1, generation_config="none")
        assert llm.generate([1, 40, 50], max_new_tokens=3, ignore_eos=True).tokens == expected

    check(damaged_json(json.loads(path.read_text())), use, limits)


@both
def test_manifest_of_a_file_with_levels_of_its_own(tmp_path: Path, limits: settings) -> None:
    """An accepted manifest describes its weights."""
    types = {"blk.1.attn_k.weight": "Q6_K", "blk.2.ffn_up.weight": "F16"}
    model = gguf_files.write(
        tmp_path / "model.gguf",
        gguf_files.Spec(matrices="Q4_K", table="Q8_0", tied=True, types=types),
    )
    path = export_engine(model, tmp_path / "plans", "--max-seq-len", 64) / "manifest.json"

    def use(text: str) -> None:
        path.write_text(text, errors="surrogatepass")
        manifest = load_manifest(path.parent)
        assert all(weight_bytes(manifest, graph) > 0 for graph in manifest.graphs)
        succeed(inspect_main, path.parent, "--memory")

    check(damaged_json(json.loads(path.read_text())), use, limits)


PROMPTS: list[Any] = [
    "def f(x):",
    {"prompt": [1, 2, 3]},
    {"prompt": "x"},
    {"messages": [{"role": "user", "content": "hi"}]},
]


@both
def test_prompt_file(engine: Path, tmp_path: Path, limits: settings) -> None:
    llm = eesd.load(engine)
    path = tmp_path / "prompts.jsonl"

    def use(case: tuple[str, str, bool]) -> None:
        path.write_text(case[0] + case[2] * "\n" + case[1], errors="surrogatepass", newline="")
        for chat in (False, True):
            for prompt in read_prompts((), path, chat):
                llm.encode(prompt)

    lines = st.one_of(*map(damaged_json, PROMPTS))
    check(st.tuples(lines, lines, st.booleans()), use, limits)


@both
def test_prompt_file_of_any_bytes(engine: Path, tmp_path: Path, limits: settings) -> None:
    llm = eesd.load(engine)

    def use(case: tuple[bytes, str]) -> None:
        path = tmp_path / f"prompts{case[1]}"
        path.write_bytes(case[0])
        for prompt in read_prompts((), path, False):
            llm.encode(prompt)

    check(st.tuples(st.binary(max_size=60), st.sampled_from([".txt", ".jsonl"])), use, limits)


@both
def test_benchmark_files(tmp_path: Path, limits: settings) -> None:
    row = {
        "task": "a",
        "prompt": "b",
        "category": "c",
        "turns": ["d"],
        "messages": [{"content": "e"}],
    }
    path = tmp_path / "rows.jsonl"
    result = tmp_path / "result.json"

    def use(text: str) -> None:
        path.write_text(text, errors="surrogatepass")
        load_tasks([str(path)])
        result.write_text(text, errors="surrogatepass")
        BenchResult.load(result)

    check(damaged_json(row), use, limits)


# Values for a command line.
UNICODE = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
TEXT = st.text(UNICODE, max_size=8) | st.sampled_from(
    [str(v) for v in ODD if not isinstance(v, (list, dict)) and v not in ("\0", "\ud800")]
)
NUMBER = TEXT | st.integers().map(str) | st.floats().map(str)
SPEC = TEXT | st.tuples(st.sampled_from([*CONTROLLERS]), NUMBER).map(
    lambda pair: f"{pair[0]}:k={pair[1]}"
)
OPTIONS: dict[str, st.SearchStrategy[str] | None] = {
    **dict.fromkeys(
        (
            "--temperature",
            "--top-k",
            "--top-p",
            "--min-p",
            "--repetition-penalty",
            "--seed",
            "--tree",
        ),
        NUMBER,
    ),
    **dict.fromkeys(
        (
            "--sampling",
            "--stop",
            "--backend",
            "--generation-config",
            "-p",
            "--engine-dir",
            "--prompt-file",
        ),
        TEXT,
    ),
    **dict.fromkeys(
        ("--chat", "--ignore-eos", "--no-draft", "--no-guard", "--json", "--compare"), None
    ),
    "--controller": SPEC,
    "--threads": NUMBER,
    "--nonsense": TEXT,
}


def command_lines(
    options: dict[str, st.SearchStrategy[str] | None],
) -> st.SearchStrategy[list[str]]:
    """Returns a strategy for lists of up to four options with odd values."""
    pairs = [
        st.tuples(st.just(name), st.none() if values is None else values)
        for name, values in options.items()
    ]
    return st.lists(st.one_of(*pairs), max_size=4).map(
        lambda found: [part for pair in found for part in pair if part is not None]
    )


@pytest.mark.parametrize(
    "count",
    [pytest.param(60, id="few"), pytest.param(MANY // 3, id="many", marks=pytest.mark.slow)],
)
def test_command_line(engine: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    llm = eesd.load(engine)
    loaded: dict[Any, LLM] = {}

    def load(directory: Path, backend: str, *, speculation: Any, **options: Any) -> LLM:
        """Loading takes most of the time, so engines are loaded only once. All checks are made."""
        if directory != engine or backend != "auto" or options["threads"] is not None:
            return eesd.load(directory, backend, speculation=speculation, **options)
        return loaded.setdefault(speculation, llm.with_speculation(speculation))

    monkeypatch.setattr("eesd.runtime.cli.load", load)
    limits = settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    check_command(
        main,
        ["--engine-dir", str(engine), "-n", "2"],
        command_lines(OPTIONS),
        limits,
        stdin="a prompt",
    )


def check_command(
    command: Command,
    first: list[str],
    lines: st.SearchStrategy[list[str]],
    limits: settings,
    stdin: str = "",
) -> None:
    """Every command line works, or ends with exit code 2 and one error line (two lines if the error
    is click's)."""

    @limits
    @given(arguments=lines)
    def cases(arguments: list[str]) -> None:
        result = run(command, *first, *arguments, stdin=stdin)
        assert result.exit_code in (0, 2), (arguments, result.exception)
        assert "Traceback" not in result.output
        if result.exit_code == 2 and not result.stderr.startswith("Usage:"):
            assert_one_line(result.stderr[result.stderr.rindex("error: ") :])

    cases()
