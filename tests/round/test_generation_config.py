"""Tests that the sampling options of ``generation_config.json`` are the default. Explicit options
take precedence, and ignored options are reported."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command import assert_refused, export_engine, run, succeed
from support.engine_dirs import edit_manifest

import eesd
from eesd.common.errors import EESDError
from eesd.export.cli import main as export_main
from eesd.model.checkpoint import Checkpoint
from eesd.model.generation_config import GENERATION_CONFIG_FILE, parse_generation_config
from eesd.runtime.cli import main

QWEN = {
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [2, 5],
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.37.0",
}
PROMPT = "to be"


def write(directory: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / GENERATION_CONFIG_FILE).write_text(text)
    return directory


@pytest.fixture
def sampled(engine_copy: Path) -> Path:
    """Engines whose generation config enables sampling."""
    return with_config(engine_copy, QWEN)


def with_config(directory: Path, content: dict[str, Any]) -> Path:
    edit_manifest(
        directory,
        "sampling",
        asdict(parse_generation_config(content, GENERATION_CONFIG_FILE).sampling),
    )
    return directory


def eesd_run(directory: Path, *options: object) -> Result:
    return succeed(
        main, "--engine-dir", directory, "-p", PROMPT, "-n", 12, "--no-stats", "--json", *options
    )


def tokens(result: Result) -> list[int]:
    found: list[int] = json.loads(result.stdout)["tokens"]
    return found


@pytest.mark.parametrize(
    ("content", "sampling", "eos", "not_applied"),
    [
        (
            QWEN,
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
            (2, 5),
            (),
        ),
        ({}, {}, None, ()),
        ({"do_sample": True}, {"temperature": 1.0}, None, ()),
        (
            {"do_sample": True, "top_k": 50, "eos_token_id": 2},
            {"temperature": 1.0, "top_k": 50},
            (2,),
            (),
        ),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}, None, ()),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.2},
            {"repetition_penalty": 1.2},
            None,
            (),
        ),
        ({"top_k": -1, "min_p": 0.05}, {"top_k": 0, "min_p": 0.05}, None, ()),
        (
            {"temperature": None, "num_beams": 1, "typical_p": 1.0, "bad_words_ids": []},
            {},
            None,
            (),
        ),
        (
            {"num_beams": 4, "no_repeat_ngram_size": 3},
            {},
            None,
            ("no_repeat_ngram_size", "num_beams"),
        ),
    ],
)
def test_what_is_read(
    content: dict[str, Any],
    sampling: dict[str, float],
    eos: tuple[int, ...] | None,
    not_applied: tuple[str, ...],
) -> None:
    config = parse_generation_config(content, GENERATION_CONFIG_FILE)
    assert (config.sampling.given, config.eos_token_ids, config.sampling.not_applied) == (
        sampling,
        eos,
        not_applied,
    )


def test_it_is_exported_with_the_model(text_model: Path, tmp_path: Path) -> None:
    model = write(shutil.copytree(text_model, tmp_path / "model"), QWEN)
    plans = export_engine(model, tmp_path / "plans")
    llm = eesd.load(plans)
    assert llm.default_sampling == eesd.Sampling(0.7, 20, 0.8, repetition_penalty=1.1)
    assert llm.manifest.eos_token_ids == (2, 5)


def test_options_of_config_json_count_where_there_is_no_such_file(
    text_model: Path, tmp_path: Path
) -> None:
    """Like EESD, transformers makes a generation config from the model's config."""
    model = shutil.copytree(text_model, tmp_path / "model")
    (model / GENERATION_CONFIG_FILE).unlink(missing_ok=True)
    config = json.loads((model / "config.json").read_text()) | {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
    }
    (model / "config.json").write_text(json.dumps(config))
    assert Checkpoint(model).config.notices == ()
    plans = export_engine(model, tmp_path / "plans")
    assert eesd.load(plans).default_sampling == eesd.Sampling(repetition_penalty=1.3)
    write(model, {"top_k": 5})
    assert "'no_repeat_ngram_size', 'repetition_penalty'" in Checkpoint(model).config.notices[0]


def test_it_is_the_default_and_shown_in_one_line(sampled: Path) -> None:
    default = eesd_run(sampled, "--seed", 3)
    same = (
        "--temperature",
        0.7,
        "--top-k",
        20,
        "--top-p",
        0.8,
        "--repetition-penalty",
        1.1,
        "--generation-config",
        "none",
    )
    assert tokens(default) == tokens(eesd_run(sampled, "--seed", 3, *same))
    assert default.stderr.splitlines() == [
        "generation_config.json: temperature 0.7, top_k 20, top_p 0.8, repetition_penalty 1.1 "
        "(--generation-config none switches it off)"
    ]
    assert tokens(default) != tokens(eesd_run(sampled, "--seed", 4)), "it samples"


def test_none_switches_it_off(sampled: Path, engine: Path) -> None:
    result = eesd_run(sampled, "--generation-config", "none")
    assert tokens(result) == tokens(eesd_run(engine)) and result.stderr == ""
    assert eesd.load(sampled, generation_config="none").default_sampling == eesd.Sampling()


def test_explicit_options_win(sampled: Path) -> None:
    result = eesd_run(sampled, "--temperature", 0, "--repetition-penalty", 1)
    assert tokens(result) == tokens(eesd_run(sampled, "--generation-config", "none"))
    assert result.stderr == "", "greedy decoding uses nothing of the file"
    assert "top_k 20, top_p 0.8," in eesd_run(sampled, "--temperature", 0.5).stderr
    llm = eesd.load(sampled)
    greedy = llm.generate(PROMPT, eesd.Sampling(), max_new_tokens=12).tokens
    assert greedy == tokens(result) and llm.generate(PROMPT, max_new_tokens=12).tokens != greedy
    assert llm.with_speculation(None).default_sampling == llm.default_sampling


def test_options_that_are_not_applied_are_named(
    text_model: Path, engine_copy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every command that loads an engine directory names these options, and so does the export."""
    config = {"no_repeat_ngram_size": 3, "num_beams": 2}
    words = "not applied: no_repeat_ngram_size, num_beams; transformers"
    eesd_run(with_config(engine_copy, config), "--generation-config", "none")
    assert words not in caplog.text
    eesd_run(engine_copy)
    assert words in caplog.text
    done = subprocess.run(
        [sys.executable, "-c", f"import eesd; eesd.load({str(engine_copy)!r})"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert words in done.stderr
    model = write(shutil.copytree(text_model, tmp_path / "model"), config)
    result = succeed(
        export_main,
        "--model",
        model,
        "--output",
        tmp_path / "plans",
        "--exit-layer",
        1,
        "--no-check",
    )
    assert words in result.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": True}, "temperature is True"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 5}, "top_p is 5"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"do_sample": "yes"}, "do_sample"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ("[1]", "JSON object"),
        ("{", "not valid JSON"),
    ],
)
def test_a_damaged_one_is_refused_by_the_export(
    text_model: Path, tmp_path: Path, content: Any, words: str
) -> None:
    model = write(shutil.copytree(text_model, tmp_path / "model"), content)
    result = run(export_main, "--model", model, "-o", tmp_path / "plans", "--exit-layer", 1)
    assert_refused(result, GENERATION_CONFIG_FILE, words)


def test_damaged_options_of_the_manifest_are_refused(engine_copy: Path) -> None:
    edit_manifest(engine_copy, "sampling/top_p", 5.0)
    assert_refused(
        run(main, "--engine-dir", engine_copy, "-p", PROMPT),
        "The manifest is damaged",
        "top_p is 5",
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=1000, deadline=None)
@given(
    content=st.dictionaries(
        st.sampled_from([*QWEN, "min_p", "num_beams", "bad_words_ids", "other"]), JSON
    )
)
def test_any_content_is_read_or_refused(content: dict[str, Any]) -> None:
    try:
        eesd.Sampling(**parse_generation_config(content, GENERATION_CONFIG_FILE).sampling.given)
    except EESDError as error:
        assert "\n" not in str(error)
