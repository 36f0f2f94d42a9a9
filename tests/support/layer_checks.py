"""Checks of models whose layers differ. They use an export that can draft. Tokens and caches equal
those of plain decoding, and values equal those of transformers."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import eesd
from eesd.controllers import make_controller
from eesd.distill import teacher
from eesd.distill.teacher import full_sequence_inputs
from eesd.export.cli import main as export_main
from eesd.model.checkpoint import Checkpoint
from eesd.model.loading import load_decoder
from eesd.runtime.batch.scheduler import Scheduler
from eesd.runtime.cli import main as run_main
from eesd.runtime.llm import LLM, Speculation
from support.batches import OPTIONS, alone, requests
from support.batches import run as run_batch
from support.command import assert_refused, run, succeed
from support.harness import Harness
from support.lossless_checks import (
    PROMPTS,
    SAMPLINGS,
    check_cache,
    check_same_tokens,
    check_tree_drafts,
)


def check_drafts(harness: Harness, name: str, width: int) -> None:
    """Check that drafts change no token and no slot of the cache. ``name`` is the name of the
    sampling."""
    controller = make_controller("fixed:k=4", seed=3)
    accepted = judged = 0
    for prompt in PROMPTS:
        stats = check_same_tokens(harness, prompt, SAMPLINGS[name], controller, width)
        accepted = accepted + stats.accepted_tokens
        judged = judged + sum(stats.verified_at_depth)
    assert 0 < accepted < judged, "acceptance and rejection must both occur"
    check_cache(harness, PROMPTS[2], SAMPLINGS[name], controller, width)
    if width > 1:
        check_tree_drafts(harness, PROMPTS[2], width)


def check_batch(llm: LLM) -> None:
    """Check that requests of a batch get the tokens that they get alone, and that some of them
    reuse kept prefixes."""
    given = list(requests(12, seed=7))
    scheduler = Scheduler(llm, OPTIONS)
    for request, record in zip(given, run_batch(scheduler, given, every=2), strict=True):
        assert record.tokens == alone(llm, request)
    assert scheduler.prefixes.hits and not scheduler.kv_used


def check_greedy_tokens(place: Path, backend: str, **options: Any) -> None:
    """Check that greedy tokens, with and without drafts, equal the tokens of transformers, which
    loads the model with ``options``."""
    reference: Any = AutoModelForCausalLM.from_pretrained(
        place / "model", dtype=torch.float32, **options
    )
    prompt = torch.tensor([PROMPTS[2]])
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    expected = reference.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    for speculation in (None, Speculation(tree=2, guard=False), Speculation(guard=False)):
        llm = eesd.load(place / "plans", backend, threads=1, speculation=speculation)
        found = llm.generate(PROMPTS[2], max_new_tokens=60, ignore_eos=True).tokens
        assert found == expected[0, len(PROMPTS[2]) :].tolist(), speculation


def check_teacher(
    model: Path, layers: int, whole: bool, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Any, Any, Any]:
    """Check that the teacher's hidden states equal the hidden states of transformers after every
    layer except the last.

    Args:
        model: The checkpoint.
        layers: Number of layers of the checkpoint.
        whole: Whether the teacher runs without caches, as on GPUs.
        monkeypatch: Sets ``whole``.
        options: How transformers loads the model.

    Returns:
        The model of transformers, the teacher's last hidden states, and the normalized last states
        of transformers.
    """
    made = partial(full_sequence_inputs, whole=whole)
    monkeypatch.setattr(teacher, "full_sequence_inputs", made)
    decoder = load_decoder(Checkpoint(model))
    ids = torch.tensor([PROMPTS[2], PROMPTS[2][::-1]])
    hidden, _ = teacher.Teacher(decoder, range(1, layers + 1), 4, "float32")(ids)
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **options)
    mask = torch.ones_like(ids)
    expected = reference(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    for layer in range(1, layers):
        torch.testing.assert_close(hidden[layer], expected[layer], rtol=1e-4, atol=1e-4)
    return reference, hidden[layers], expected[layers]


def check_narrow_caches(plans: Path, dtype: str) -> None:
    """Check that drafts in chains and trees change no token if the KV cache has this type."""
    for tree in (1, 2):
        speculation = Speculation("fixed:k=4", tree=tree, guard=False)
        load = partial(eesd.load, plans, threads=1, kv_cache_dtype=dtype)
        drafts = load(speculation=speculation)
        plain = load(speculation=None)
        found = drafts.generate(PROMPTS[2], max_new_tokens=50, ignore_eos=True)
        assert found.tokens == plain.generate(PROMPTS[2], max_new_tokens=50, ignore_eos=True).tokens
        assert found.stats.accepted_tokens


def check_command(model: Path, cache: Path) -> None:
    """Check that ``eesd-run --model`` exports the model, with the whole model in fewer bits as the
    draft, and that a second run without drafts gives the same tokens."""
    ask = ("-p", "hello there", "-n", 40, "--ignore-eos", "--json", "--cache-dir", cache)
    given = ("--model", model, "--exit-head", "quantized", "--dtype", "float32")
    drafts, plain = (
        json.loads(succeed(run_main, *given, *ask, *more).stdout) for more in ((), ("--no-draft",))
    )
    assert drafts["tokens"] == plain["tokens"] and drafts["stats"]["accepted_tokens"]


def check_config_is_refused(
    model: Path, scratch: Path, changed: dict[str, Any], words: Sequence[str]
) -> None:
    """Check that an export refuses the model if its config has these values. The error is a
    sentence with these words."""
    for file in model.iterdir():
        (scratch / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text()) | changed
    (scratch / "config.json").unlink()
    (scratch / "config.json").write_text(json.dumps(config))
    assert_refused(run(export_main, "--model", scratch, "-o", scratch / "plans"), *words)
