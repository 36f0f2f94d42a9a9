"""Tests of latent attention, whose cached rows are keys and values at the same time. The tests run
on each backend, with chains, trees, batches, prompts in pieces, and kept beginnings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import add_tokenizer, succeed
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
from support.without_operators import needs_operators
from transformers import AutoModelForCausalLM

import eesd
from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig
from eesd.common.manifest import load_manifest
from eesd.export.cli import main as export_main
from eesd.model.checkpoint import Checkpoint
from eesd.model.loading import make_initial_head, save_exit_head

CONFIG: dict[str, Any] = SMALL | {
    "vocab_size": 97,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 384,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
}
del CONFIG["head_dim"]
Shared = Callable[[str, Callable[[Path], object]], Path]


def fill(path: Path) -> None:
    """Write a model, and a head of copied layers. The draft leaves out layers whose weights are
    small."""
    model = FamilyCase("deepseek_v3", CONFIG, 2).write(path / "whole")
    weights: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        layer = weights.model.layers[3]
        outputs = (layer.self_attn.o_proj.weight, layer.mlp.experts.down_proj)
        for weight in (*outputs, layer.mlp.shared_experts.down_proj.weight):
            weight *= 0.3
    weights.save_pretrained(path / "model")
    add_tokenizer(path / "model")
    checkpoint = Checkpoint(path / "model")
    config = ExitConfig(3, base=checkpoint.fingerprint(), trained=True)
    save_exit_head(make_initial_head(checkpoint, config), path / "head", torch.float32)
    for name, own in (("plans", ("--quantize-draft", "none")), ("stages", ("--stages", 2))):
        options = ("--exit-head", path / "head", "--dtype", "float32", *own)
        succeed(export_main, "--model", path / "model", "-o", path / name, *options)


@pytest.fixture(scope="module")
def place(shared: Shared) -> Path:
    return shared("latent", fill)


@pytest.fixture(scope="module", params=["own", "standard"])
def harness(request: pytest.FixtureRequest, place: Path) -> Harness:
    return Harness(place / "plans", standard=request.param == "standard")


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", ["greedy", "T1"])
def test_drafting_gives_the_tokens_of_plain_decoding(
    harness: Harness, name: str, width: int
) -> None:
    check_drafts(harness, name, width)


@pytest.mark.parametrize(
    ("backend", "plans"), [("ort", "plans"), ("ort", "stages"), ("torch", "plans")]
)
def test_a_batch_gives_the_tokens_of_each_request_alone(
    place: Path, backend: str, plans: str
) -> None:
    """The batch has rows that draft, prompts in pieces of 16 tokens, and kept beginnings."""
    check_batch(eesd.load(place / plans, backend, threads=1))


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_the_tokens_are_those_of_transformers(place: Path, backend: str) -> None:
    check_greedy_tokens(place, backend, experts_implementation="eager")


@pytest.mark.parametrize("whole", [False, True])
def test_a_teacher_computes_the_model(
    place: Path, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher runs with caches, as it does on CPUs, and without caches, as it does on GPUs."""
    check_teacher(place / "model", 5, whole, monkeypatch, experts_implementation="eager")


@needs_operators()
def test_rounded_caches_are_the_same_in_drafts_and_without(place: Path) -> None:
    check_narrow_caches(place / "plans", "float16")
    with pytest.raises(EESDError, match="float32 or float16"):
        eesd.load(place / "plans", threads=1, kv_cache_dtype="int8").generate([1, 2])


def test_the_command_gives_the_same_text_with_drafts(place: Path, tmp_path: Path) -> None:
    check_command(place / "model", tmp_path)


def test_a_token_takes_a_row_in_the_cache(place: Path) -> None:
    manifest = load_manifest(place / "plans")
    geometry = manifest.geometry
    assert (geometry.num_kv_heads, geometry.cache_columns) == (1, 28)  # 20 + 6 columns, padded
    assert manifest.num_caches == 6
    with pytest.raises(EESDError, match="latent attention"):
        manifest.on_rank(2)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rope_interleave": False}, ("rope_interleave",)),
        ({"num_key_value_heads": 2}, ("num_key_value_heads",)),
        ({"head_dim": 8}, ("head_dim must equal qk_rope_head_dim",)),
        ({"kv_lora_rank": 571}, ("kv_lora_rank is 571", "570")),
        ({"qk_rope_head_dim": 5}, ("qk_rope_head_dim is 5",)),
        ({"v_head_dim": None}, ("v_head_dim",)),
        ({"kv_lora_rank": 24}, ("kv_a",)),
        ({"v_head_dim": 13}, ("heads.0.k_b_proj",)),
    ],
)
def test_what_is_not_supported_is_refused(
    place: Path, tmp_path: Path, changed: dict[str, Any], words: tuple[str, ...]
) -> None:
    check_config_is_refused(place / "model", tmp_path, changed, words)
