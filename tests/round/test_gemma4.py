"""Tests of Gemma 4. It has layers of different shapes, layers that read the keys and values of
other layers, and per-layer inputs. The tests run on each backend, with chains, trees, batches,
prompts in pieces, and kept beginnings."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import add_tokenizer, assert_refused, run, succeed
from support.family_grid import SMALL, FamilyCase
from support.harness import Harness
from support.layer_checks import (
    check_batch,
    check_command,
    check_config_is_refused,
    check_drafts,
    check_greedy_tokens,
    check_narrow_caches,
    check_teacher,
)
from support.lossless_checks import (
    PROMPTS,
)
from support.tiny_checkpoints import randomise
from support.without_operators import needs_operators
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import eesd
from eesd.common.geometry import ExitConfig
from eesd.common.manifest import load_manifest
from eesd.export.cli import main as export_main
from eesd.model.checkpoint import Checkpoint
from eesd.model.inputs import causal_inputs, empty_caches
from eesd.model.loading import load_decoder, make_initial_head, save_exit_head

CONFIG: dict[str, Any] = SMALL | {
    "vocab_size": 97,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 16,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "global_head_dim": 12,
    "intermediate_size": 48,
    "use_double_wide_mlp": True,
    "max_position_embeddings": 384,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "sliding_window": 40,
}
"""Heads have 8 or 12 values, so a head of a cache has 4 values. If there are 12 inputs, torch's
products depend on the number of rows. If there are 16 inputs, they do not."""
EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2}
DENSE = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True}
KINDS = {"inputs": {}, "experts": DENSE | EXPERTS | {"moe_intermediate_size": 24}}
Shared = Callable[[str, Callable[[Path], object]], Path]


def fill(kind: str, path: Path) -> None:
    """Write a model, and a head of copied layers. The draft skips layers whose weights are
    small."""
    model = FamilyCase("gemma4_text", CONFIG | KINDS[kind], 2).write(path / "whole")
    weights: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for layer in weights.model.layers[3:]:
            layer.post_attention_layernorm.weight *= 0.05
            layer.post_feedforward_layernorm.weight *= 0.05
    weights.save_pretrained(path / "model")
    add_tokenizer(path / "model")
    checkpoint = Checkpoint(path / "model")
    config = ExitConfig(2, base=checkpoint.fingerprint(), trained=True)
    save_exit_head(make_initial_head(checkpoint, config), path / "head", torch.float32)
    options = ("--exit-head", path / "head", "--dtype", "float32", "--quantize-draft", "none")
    succeed(export_main, "--model", path / "model", "-o", path / "plans", *options)


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest, shared: Shared) -> Path:
    return shared(f"gemma4 {request.param}", partial(fill, request.param))


@pytest.fixture(scope="module", params=["own", "standard"])
def harness(request: pytest.FixtureRequest, place: Path) -> Harness:
    return Harness(place / "plans", standard=request.param == "standard")


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", ["greedy", "T1"])
def test_drafting_gives_the_tokens_of_plain_decoding(
    harness: Harness, name: str, width: int
) -> None:
    check_drafts(harness, name, width)


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_a_batch_gives_the_tokens_of_each_request_alone(place: Path, backend: str) -> None:
    """The batch has rows that draft, prompts in pieces of 16 tokens, and kept beginnings."""
    llm = eesd.load(place / "plans", backend, threads=1)
    check_batch(llm)


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_the_tokens_are_those_of_transformers(place: Path, backend: str) -> None:
    check_greedy_tokens(place, backend, experts_implementation="eager")


@pytest.mark.parametrize("whole", [False, True])
def test_a_teacher_computes_the_model(
    place: Path, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher runs with caches, as it does on CPUs, and without caches, as it does on GPUs."""
    check_teacher(place / "model", 6, whole, monkeypatch, experts_implementation="eager")


@needs_operators()
@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_rounded_caches_are_the_same_in_drafts_and_without(place: Path, kind: str) -> None:
    check_narrow_caches(place / "plans", kind)


def test_the_command_gives_the_same_text_with_drafts(place: Path, tmp_path: Path) -> None:
    check_command(place / "model", tmp_path)


def test_the_text_model_of_a_whole_model_is_used_alone(tmp_path: Path) -> None:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": 4,
    }
    parts = {"text_config": CONFIG, "vision_config": vision, "audio_config": None}
    ids = {f"{name}_token_id": 80 for name in ("image", "video", "audio")}
    whole = AutoConfig.for_model("gemma4", **parts, **ids)
    model: Any = AutoModelForImageTextToText.from_config(whole, dtype=torch.float32)  # type: ignore[no-untyped-call]
    randomise(model, 1)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert "the text model alone" in checkpoint.config.notices[-1]
    tokens = torch.tensor([PROMPTS[2]])
    count = tokens.shape[1]
    inputs = causal_inputs(checkpoint.geometry, 1, count, count)
    caches = empty_caches(checkpoint.geometry, 1, count)
    with torch.no_grad():
        found = load_decoder(checkpoint)(tokens, inputs, caches)[0]
        expected = model.eval()(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * float(expected.abs().max()))


def test_caches_have_no_place_for_layers_that_read_others(place: Path) -> None:
    manifest = load_manifest(place / "plans")
    shares = manifest.geometry.shared_from > 0
    assert manifest.num_caches == (5 if shares else 7)
    assert manifest.draft.caches == (0, 1, manifest.num_caches - 1)
    options = ("--exit-head", place / "head", "--stages", 2)
    output = place / "stages"
    if shares:
        refused = run(export_main, "--model", place / "model", "-o", output, *options)
        assert_refused(refused, "--stages 2 cannot be used")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"use_bidirectional_attention": "all"}, ("use_bidirectional_attention",)),
        ({"hidden_activation": "silu"}, ("hidden_activation",)),
        ({"num_kv_shared_layers": 6}, ("num_kv_shared_layers is 6",)),
        ({"num_kv_shared_layers": 5}, ("no layer has the keys and values",)),
        ({"per_layer_config": {"1": {"head_dim": 12}}}, ("per_layer_config",)),
        ({"per_layer_config": [12]}, ("per_layer_config",)),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 5}, ("vocab_size",)),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, ("rope scaling 'yarn'",)),
        ({"hidden_size_per_layer_input": 7, "vocab_size_per_layer_input": 97}, ("input",)),
    ],
)
def test_what_is_not_supported_is_refused(
    place: Path, tmp_path: Path, changed: dict[str, Any], words: tuple[str, ...]
) -> None:
    check_config_is_refused(place / "model", tmp_path, changed, words)
