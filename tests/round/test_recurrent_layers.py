"""Tests of short convolutions (LFM2) and the gated delta rule (Qwen3.5). The states of rejected
tokens have no effect on later tokens. This holds on each backend, with chains, trees, batches,
prompts in pieces, and kept beginnings."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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
from eesd.model.config import load_config
from eesd.model.loading import make_initial_head, save_exit_head

SIZES: dict[str, Any] = SMALL | {
    "vocab_size": 97,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 384,
}
Shared = Callable[[str, Callable[[Path], object]], Path]


class Kind(NamedTuple):
    """A recurrent layer.

    Attributes:
        model_type: The name of a family with recurrent layers.
        options: Options of the family's config.
        outputs: Modules of a block that write into the hidden states.
        norm: The last norm.
        caches: Caches of a layer's states.
    """

    model_type: str
    options: dict[str, Any]
    outputs: tuple[str, str]
    norm: str
    caches: int


KINDS = {
    "convolution": Kind(
        "lfm2",
        {
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        },
        ("conv.out_proj", "feed_forward.w2"),
        "embedding_norm",
        2,
    ),
    "delta": Kind(
        "qwen3_5_text",
        {
            "layer_types": [
                *["linear_attention"] * 2,
                *("full_attention", "linear_attention", "full_attention"),
            ],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 5,
            "linear_value_head_dim": 20,
        },
        ("linear_attn.out_proj", "mlp.down_proj"),
        "norm",
        13,
    ),
}


def fill(kind: Kind, path: Path) -> None:
    """Write a model, and a head that is a copy of the model's last layer. The draft skips a
    recurrent layer whose weights are small."""
    model = FamilyCase(kind.model_type, SIZES | kind.options, 2).write(path / "whole")
    weights: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name in kind.outputs:
            weights.model.layers[3].get_submodule(name).weight *= 0.3
    weights.save_pretrained(path / "model")
    add_tokenizer(path / "model")
    checkpoint = Checkpoint(path / "model")
    config = ExitConfig(3, base=checkpoint.fingerprint(), trained=True)
    save_exit_head(make_initial_head(checkpoint, config), path / "head", torch.float32)
    for name, own in (("plans", ("--quantize-draft", "none")), ("stages", ("--stages", 2))):
        options = ("--exit-head", path / "head", "--dtype", "float32", *own)
        succeed(export_main, "--model", path / "model", "-o", path / name, *options)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def place(shared: Shared, kind: Kind) -> Path:
    return shared(f"recurrent-{kind.model_type}", partial(fill, kind))


@pytest.fixture(scope="module")
def convolutions(shared: Shared) -> Path:
    kind = KINDS["convolution"]
    return shared(f"recurrent-{kind.model_type}", partial(fill, kind))


@pytest.fixture(scope="module", params=["own", "standard"])
def harness(request: pytest.FixtureRequest, place: Path) -> Harness:
    return Harness(place / "plans", standard=request.param == "standard")


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", ["greedy", "T1"])
def test_drafting_gives_the_tokens_of_plain_decoding(
    harness: Harness, name: str, width: int
) -> None:
    check_drafts(harness, name, width)


def test_the_standard_graphs_and_the_operators_agree(place: Path, kind: Kind) -> None:
    manifest = load_manifest(place / "plans")
    count = 3 * kind.caches + 3
    assert manifest.verify[0].caches == tuple(range(count)) and manifest.num_caches == count
    assert manifest.draft.caches == (*range(2 * kind.caches + 1), count - 1)
    tokens = np.random.default_rng(0).integers(0, 97, 40).tolist()
    one, other = (Harness(place / "plans", standard=of) for of in (True, False))
    found = [of.session(tokens).peek() for of in (one, other)]
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-4 * np.abs(found[0]).max())


@pytest.mark.parametrize(
    ("backend", "plans"), [("ort", "plans"), ("ort", "stages"), ("torch", "stages")]
)
def test_a_batch_gives_the_tokens_of_each_request_alone(
    place: Path, backend: str, plans: str
) -> None:
    """The batch has rows that draft, prompts in pieces of 16 tokens, and kept beginnings."""
    llm = eesd.load(place / plans, backend, threads=1)
    check_batch(llm)


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_the_tokens_are_those_of_transformers(place: Path, backend: str) -> None:
    check_greedy_tokens(place, backend)


@pytest.mark.parametrize("whole", [False, True])
def test_a_teacher_computes_the_model(
    place: Path, kind: Kind, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher runs with caches that layers share, as it does on CPUs, and without caches, as it
    does on GPUs."""
    reference, hidden, expected = check_teacher(place / "model", 5, whole, monkeypatch)
    normed = reference.model.get_submodule(kind.norm)(hidden)
    torch.testing.assert_close(normed, expected, rtol=1e-4, atol=1e-4)


@needs_operators()
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_rounded_states_are_the_same_in_drafts_and_without(convolutions: Path, dtype: str) -> None:
    check_narrow_caches(convolutions / "plans", dtype)


def test_the_command_gives_the_same_text_with_drafts(place: Path, tmp_path: Path) -> None:
    check_command(place / "model", tmp_path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"conv_bias": True}, ("conv_bias", "not supported")),
        ({"conv_L_cache": 17}, ("conv_L_cache is 17", "16")),
        ({"layer_types": ["conv", "sliding_attention"] + ["conv"] * 3}, ("sliding_attention",)),
        ({"layer_types": [["conv"], "full_attention"] + ["conv"] * 3}, ("layer_types has",)),
        ({"layer_types": [None, "full_attention"] + ["conv"] * 3}, ("layer_types has",)),
        ({"layer_types": None, "full_attn_idxs": "2"}, ("full_attn_idxs",)),
        ({"conv_L_cache": 4}, ("conv.conv.weight", "[32, 1, 3]", "[32, 1, 4]")),
    ],
)
def test_what_is_not_supported_is_refused(
    convolutions: Path, tmp_path: Path, changed: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert_config_refused(convolutions, tmp_path, changed, *words)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden_act": "gelu_pytorch_tanh"}, ("hidden_act", "silu")),
        ({"linear_conv_kernel_dim": 17}, ("linear_conv_kernel_dim is 17", "16")),
        ({"linear_num_value_heads": 3}, ("2 key heads", "do not divide")),
        ({"linear_key_head_dim": 600}, ("600", "512")),
        ({"linear_value_head_dim": 21}, ("linear_attn.in_qkv_proj.weight", "[100, 32]")),
        ({"layer_types": ["mamba"] + ["full_attention"] * 4}, ("layer_types has", "mamba")),
    ],
)
def test_sizes_of_the_delta_rule_that_do_not_fit_are_refused(
    shared: Shared, tmp_path: Path, changed: dict[str, Any], words: tuple[str, ...]
) -> None:
    kind = KINDS["delta"]
    place = shared(f"recurrent-{kind.model_type}", partial(fill, kind))
    assert_config_refused(place, tmp_path, changed, *words)


@needs_operators()
def test_the_delta_rule_needs_a_cache_of_float32(shared: Shared) -> None:
    kind = KINDS["delta"]
    place = shared(f"recurrent-{kind.model_type}", partial(fill, kind))
    with pytest.raises(EESDError, match="float32"):
        eesd.load(place / "plans", kv_cache_dtype="int8").generate([1, 2], max_new_tokens=2)


def assert_config_refused(
    place: Path, tmp_path: Path, changed: dict[str, Any], *words: str
) -> None:
    check_config_is_refused(place / "model", tmp_path, changed, words)


def test_a_published_config_is_read(tmp_path: Path) -> None:
    """The config has the fields of Liquid AI's configs, which transformers renames."""
    config = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 16,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "vocab_size": 65536,
        "block_ff_dim": 6656,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 128000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    geometry = load_config(tmp_path).geometry
    assert (geometry.intermediate_size, geometry.taps, geometry.num_caches) == (4608, 3, 16)
    assert geometry.attention_layers == [2, 5, 8, 10, 12, 14] and geometry.tied_embeddings
    with pytest.raises(EESDError, match="short convolutions"):
        geometry.on_rank(2)


def test_a_head_needs_layers_with_attention(place: Path) -> None:
    """The blocks of a head start from layers with attention."""
    with pytest.raises(EESDError, match="between 0 and 2 blocks"):
        make_initial_head(Checkpoint(place / "model"), ExitConfig(1, blocks=3))
