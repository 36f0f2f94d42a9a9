"""The rules for weights name exactly the parameters of the torch modules. Builds compare them with
the weights in graphs."""

from dataclasses import replace

import pytest
from lease.engines import llama
from torch import nn

from eesd.common.geometry import (
    ExitConfig,
    Experts,
    Geometry,
    RopeScaling,
)
from eesd.common.quantization import LM_HEAD, Quantization, Quantizations, Shape, parts_of
from eesd.common.weights import (
    EMBEDDINGS,
    SCALES,
    exit_head_shapes,
    graph_shapes,
    model_shapes,
    packed_name,
    stored_weight,
)
from eesd.model.decoder import Decoder, ExitHead
from eesd.model.initial_head import initial_names
from eesd.runtime.engines.trt_plans import LONG_CACHE, one_node_is_faster

pytestmark = pytest.mark.fast

SLOTS = 16
LLAMA = replace(llama(4, 64, 96, 4, 2, 97), rope_theta=10000.0)
FAMILIES = {
    "llama2": replace(LLAMA, num_kv_heads=4),
    "llama3": replace(LLAMA, rope_scaling=RopeScaling("llama3", 8.0)),
    "llama-tied": replace(LLAMA, tied_embeddings=True),
    "llama-bias": replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True),
    "mistral": replace(LLAMA, num_kv_heads=1, head_dim=24),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3-tied": replace(LLAMA, qk_norm=True, head_dim=32, tied_embeddings=True),
    "experts": replace(LLAMA, experts=Experts(2, 2, 48, normed=True, dense_layers=(1,))),
}
HEADS = [(layer, blocks, own) for layer in (1, 3) for blocks in (1, 2, 3) for own in (False, True)]


def shapes_of(module: nn.Module) -> dict[str, Shape]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


@pytest.fixture(params=FAMILIES)
def geometry(request: pytest.FixtureRequest) -> Geometry:
    return FAMILIES[request.param]


def test_model_shapes_are_the_parameters_of_the_decoder(geometry: Geometry) -> None:
    assert model_shapes(geometry) == shapes_of(Decoder(geometry))


@pytest.mark.parametrize(("layer", "blocks", "own_lm_head"), HEADS)
def test_exit_head_shapes_are_the_parameters_of_the_exit_head(
    geometry: Geometry, layer: int, blocks: int, own_lm_head: bool
) -> None:
    config = ExitConfig(layer, blocks, own_lm_head)
    shapes = exit_head_shapes(geometry, config)
    model = model_shapes(geometry)
    assert shapes == shapes_of(ExitHead(geometry, config))
    if geometry.experts is None:
        assert {
            name: model[base] for name, (base,) in initial_names(geometry, config).items()
        } == shapes
    assert {
        base for bases in initial_names(geometry, config).values() for base in bases
    } <= model.keys()


@pytest.mark.parametrize("own_lm_head", [False, True])
def test_a_draft_vocabulary_is_part_of_the_exit_head(geometry: Geometry, own_lm_head: bool) -> None:
    config = ExitConfig(1, own_lm_head=own_lm_head, draft_vocab=50)
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in ExitHead(geometry, config).state_dict().items()
    }
    assert exit_head_shapes(geometry, config) == shapes and shapes["draft_vocab"] == (50,)
    assert not own_lm_head or shapes["lm_head.weight"] == (50, geometry.hidden_size)


def test_packed_weights_have_the_rows_of_their_parts() -> None:
    config = ExitConfig(1)
    apart = graph_shapes(LLAMA, config, SLOTS, range(2), draft=False, packed=False)
    packed = graph_shapes(LLAMA, config, SLOTS, range(2), draft=False)
    # Verify computes only keys and values there.
    assert "exit_head.blocks.0.self_attn.kv_proj.weight" in packed
    for name, shape in packed.items():
        parts = [apart[part] for part in parts_of(name)]
        assert shape == (sum(part[0] for part in parts), *parts[0][1:])
        assert len(parts) == 1 or packed_name(parts_of(name)) == name
    assert sorted(part for name in packed for part in parts_of(name)) == sorted(apart)


INT8 = Quantization("int8", 32)
INT4 = Quantization("int4", 32)


@pytest.mark.parametrize(
    ("quantization", "drafts_with_int8"),
    [
        (Quantizations(), False),
        (Quantizations(layers=INT4, head=INT4, draft=INT4), False),
        (Quantizations(layers=INT8, head=INT8, draft=INT8), True),
        (Quantizations(layers=INT8, head=INT8, draft=INT4), False),
        (Quantizations(layers=INT8), True),
        (Quantizations(draft=INT8), True),
    ],
)
def test_one_node_is_not_faster_where_the_draft_has_int8_weights(
    quantization: Quantizations, drafts_with_int8: bool
) -> None:
    assert one_node_is_faster(LONG_CACHE, quantization) != drafts_with_int8


def test_layers_with_levels_of_their_own_are_packed_if_they_are_alike() -> None:
    """A tied LM head is the embedding table, of which the draft has no copy. Biases stay separate
    like their layers."""
    geometry = replace(LLAMA, qkv_bias=True, tied_embeddings=True)
    layer = "model.layers.0"
    own = {EMBEDDINGS: replace(INT8, scales="float16")}
    own |= {f"{layer}.self_attn.{part}_proj.weight": INT4 for part in "qk"}
    own |= {
        f"{layer}.mlp.{part}_proj.weight": replace(INT4, minimums=True, scales="float32")
        for part in ("gate", "up")
    }
    quantization = Quantizations(draft=INT4, tensors=own)
    for draft in (True, False):
        shapes = graph_shapes(
            geometry, ExitConfig(1), SLOTS, range(4), draft, quantization=quantization
        )
        of_layer = {name for name in shapes if name.removeprefix("draft.").startswith(layer)}
        first = {name for name in of_layer if "self_attn" in name and "o_proj" not in name}
        value = f"{'draft.' * draft}{layer}.self_attn.v_proj.weight"
        apart = {
            f"{layer}.self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")
        }
        assert first == apart - {f"{layer}.self_attn.v_proj.weight"} | {value}
        assert (
            f"{layer}.mlp.gate_up_proj.weight" in of_layer
            and LM_HEAD not in shapes
            and "draft.lm_head.weight" not in shapes
        )
        table = stored_weight(EMBEDDINGS, shapes[EMBEDDINGS], "float32", quantization)
        rows, width = shapes[EMBEDDINGS]
        assert not table.transposed and table.scales_shape == (rows, width // 32)
        assert table.tensors == {
            EMBEDDINGS: rows * width,
            EMBEDDINGS + SCALES: rows * width // 32 * 2,
        }
