"""Tests of short convolutions (LFM2), the gated delta rule (Qwen3.5) and state spaces (Granite 4).
The states of rejected tokens have no effect on later tokens. This holds on each backend, with
chains, trees, batches, prompts in pieces, and kept beginnings."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.batches import SAMPLINGS as SAMPLINGS_OF_BATCHES
from support.batches import arrive_at_random, check_pauses
from support.command import add_tokenizer, succeed
from support.family_grid import SMALL, FamilyCase
from support.harness import Harness, Wrapped
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
    SAMPLINGS,
    check_interrupted_anywhere,
    check_same_tokens,
)
from support.without_operators import needs_operators
from transformers import AutoModelForCausalLM

import eesd
from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig
from eesd.common.manifest import load_manifest
from eesd.controllers import make_controller
from eesd.export.cli import main as export_main
from eesd.model.checkpoint import Checkpoint
from eesd.model.config import load_config
from eesd.model.loading import make_initial_head, save_exit_head
from eesd.model.safetensors_file import CheckpointTensor
from eesd.runtime.engines.base import StepOutputs
from eesd.runtime.session import Session

SIZES: dict[str, Any] = SMALL | {
    "vocab_size": 97,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 384,
}
HOLE = 97
"""A token whose embedding is NaN, so that its states and the states of all tokens after it are
NaN."""
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
    "space": Kind(
        "granitemoehybrid",
        {
            "layer_types": [
                *["linear_attention"] * 2,
                *("full_attention", "linear_attention", "full_attention"),
            ],
            "num_local_experts": 4,
            "shared_intermediate_size": 24,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 5,
        },
        ("mamba.out_proj", "shared_mlp.output_linear"),
        "norm",
        11,
    ),
}


def fill(kind: Kind, path: Path, hole: bool = False) -> None:
    """Write a model, and a head that is a copy of the model's last layer. The draft skips a
    recurrent layer whose weights are small.

    With ``hole``, the model also has the token :data:`HOLE`, whose logit is always low.
    """
    sizes = SIZES | kind.options
    if hole:
        sizes |= {"tie_word_embeddings": False, "vocab_size": HOLE + 1}
    model = FamilyCase(kind.model_type, sizes, 2).write(path / "whole")
    weights: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name in kind.outputs:
            weights.model.layers[3].get_submodule(name).weight *= 0.3
        if hole:
            for name, weight in weights.model.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", f"{kind.outputs[1]}.weight")):
                    weight[0] = 0  # the first value of a hidden state is that of the embedding
            weights.model.embed_tokens.weight[:, 0] = 4
            weights.model.embed_tokens.weight[HOLE] = torch.nan
            weights.model.get_submodule(kind.norm).weight[0] = 1
            weights.lm_head.weight[HOLE] = torch.tensor([-30.0, *[0] * 31])
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


class Disturbed:
    """Disturbs the outputs of a draft engine. In some of the calls, all outputs are NaN. In others,
    the likely tokens are random or :data:`HOLE`.

    Attributes:
        counts: Number of calls for each disturbance.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self.counts = Counter[str]()

    def __call__(self, _: Sequence[int], __: int, outputs: StepOutputs) -> None:
        kind = str(self._random.choice(["none", "not a number", "random", "hole"]))
        self.counts[kind] += 1
        ids, logprobs = outputs.topk_ids, outputs.topk_logprobs
        assert ids is not None and logprobs is not None
        if kind == "not a number":
            logprobs[:] = np.nan
        elif kind == "random":
            first = self._random.integers(0, HOLE, (len(ids), 1))
            ids[:] = (first + np.arange(ids.shape[1])) % HOLE
        elif kind == "hole":
            ids[:, self._random.integers(ids.shape[1])] = HOLE


@pytest.fixture(scope="module")
def holed(shared: Shared, kind: Kind) -> Path:
    with pytest.MonkeyPatch.context() as patch:  # an export refuses a model with NaN
        patch.setattr(CheckpointTensor, "checked", lambda _, values: values)
        place = shared(f"recurrent-{kind.model_type}-holed", partial(fill, kind, hole=True))
    return place / "plans"


@needs_operators()
@pytest.mark.parametrize("name", ["greedy", "T1"])
@pytest.mark.parametrize("width", [1, 3])
def test_drafts_that_are_nan_or_random_change_no_bit(
    holed: Path, monkeypatch: pytest.MonkeyPatch, width: int, name: str
) -> None:
    """Rejected nodes are NaN in the verify pass, too. They leave NaN in slots and states, which no
    later token may read."""
    harness = Harness(holed, standard=False)
    disturbed = Disturbed()
    parts = harness.workspace()
    parts = replace(parts, draft=Wrapped(parts.draft, after=disturbed))
    monkeypatch.setattr(harness, "workspace", lambda: parts)
    accepted = 0
    for prompt in PROMPTS:
        controller = make_controller("fixed:k=4", seed=3)
        stats = check_same_tokens(harness, prompt, SAMPLINGS[name], controller, width)
        accepted += stats.accepted_tokens
    assert accepted and min(disturbed.counts.values()) > 3 and len(disturbed.counts) == 4


@needs_operators()
@pytest.mark.parametrize("levels", [None, 3])
def test_requests_of_a_batch_pause_and_are_cancelled(holed: Path, levels: int | None) -> None:
    """Eight rows draft with disturbed drafts. There is little memory, so rows lose their states and
    compute them again, also from kept beginnings."""
    llm = eesd.load(holed, "ort", threads=1)
    records = arrive_at_random(llm, 24)
    assert 5 < sum(record.reason != "cancelled" for record in records) < 24
    assert llm.engines.draft is not None
    disturbed = Disturbed()
    draft = Wrapped(llm.engines.draft, after=disturbed)
    llm.engines = llm.engines._replace(draft=draft)
    llm.drafting = llm.drafting.with_drafter(engine=draft)
    # With rejection sampling, the tokens would depend on the disturbances.
    samplings = [one for one in SAMPLINGS_OF_BATCHES if one.method != "rejection"]
    check_pauses(llm, 8, levels, samplings)
    assert len(disturbed.counts) == 4


@needs_operators()
def test_a_round_may_be_cancelled_at_any_line(place: Path) -> None:
    harness = Harness(place / "plans", standard=False)
    controller = make_controller("fixed:k=3")

    def make() -> Session:
        return harness.session(PROMPTS[0], SAMPLINGS["T1"], controller, 2, new_tokens=8)

    assert check_interrupted_anywhere(make, 1) > 60


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
