"""Torch engines of any shape, whose random weights are made on the device without reading or
writing files."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from eesd.common.geometry import ExitConfig, Geometry, draft_caches, exit_caches
from eesd.common.manifest import FORMAT_VERSION, GraphInfo, Manifest, SamplingDefaults
from eesd.common.quantization import Quantizations
from eesd.model.decoder import Decoder, ExitHead
from eesd.model.graphs import Draft, Verify
from eesd.model.rotary import rotary_tables
from eesd.runtime.engines.device import DeviceStream, device_streams
from eesd.runtime.engines.device_cache import RowMemory
from eesd.runtime.engines.device_engine import DeviceEngine, make_engines
from eesd.runtime.engines.torch_engine import ROWS, TorchStageRunner
from eesd.runtime.engines.torch_quantized import (
    PANEL,
    WORDS,
    ComputedBefore,
    QuantizedLinear,
    QuantizedWeight,
)
from eesd.runtime.engines.torch_weights import has_kernels

TOP_K = 8
BLOCK = 32
"""Number of inputs that share a scale."""
JOINT = (
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj mlp.up_proj",
    "mlp.down_proj",
)
"""The layers of a block. Layers in the same string read the same input, and become one product."""


def llama(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int
) -> Geometry:
    """Return the geometry of a Llama 3 of these sizes."""
    return Geometry(
        architecture="LlamaForCausalLM",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        rms_norm_eps=1e-5,
        tied_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope_theta=500000.0,
        rope_scaling=None,
    )


def made_up(
    geometry: Geometry, exit_head: ExitConfig, dtype: str, slots: int, nodes: int
) -> Manifest:
    """Return a manifest of a directory that does not exist."""
    own = tuple(range(geometry.num_layers)) + tuple(exit_caches(geometry, exit_head))
    return Manifest(
        format_version=FORMAT_VERSION,
        model="random weights",
        geometry=geometry,
        exit_head=exit_head,
        dtype=dtype,
        quantization=Quantizations(),
        max_seq_len=slots,
        max_tree_nodes=nodes,
        draft_top_k=TOP_K,
        bos_token_id=None,
        eos_token_ids=(),
        sampling=SamplingDefaults(),
        draft=GraphInfo("draft.onnx", tuple(draft_caches(geometry, exit_head)), (), ()),
        verify=(GraphInfo("verify.onnx", own, (), ()),),
        files={},
        linked={},
        tools={},
        plans={},
    )


def random_engines(
    manifest: Manifest,
    device: str,
    exact: bool | None = None,
    fused: bool | None = None,
    levels: str = "",
) -> tuple[DeviceEngine, DeviceEngine]:
    """Make the verify engine and the draft engine of a manifest with random weights.

    Args:
        manifest: From :func:`made_up`.
        device: Torch device.
        exact: Whether all rounds have the same node count, as in ``open_engines``.
        fused: Whether blocks run the kernels of ``torch_fused.py``. None uses them on a GPU if
            possible.
        levels: Engines with 4-bit weights in blocks and LM head: ``draft`` or ``both``.
    """
    dtype: torch.dtype = getattr(torch, manifest.dtype)
    (stream,) = device_streams(1, device)
    with torch.device("meta"):
        decoder = Decoder(manifest.geometry).to(dtype)
        head = ExitHead(manifest.geometry, manifest.exit_head).to(dtype)
    for module in (decoder, head):
        module.to_empty(device=stream.device).requires_grad_(False)
    if head.draft_vocab is not None:
        head.draft_vocab.copy_(torch.arange(len(head.draft_vocab)))
    _fill([*decoder.named_parameters(), *head.named_parameters()])
    drafting = deepcopy(decoder) if levels == "draft" else decoder
    if levels:
        _quantize(drafting)
    of_verify = Verify(decoder, head)
    of_draft = Draft(drafting, head, TOP_K)
    if fused is None:
        fused = has_kernels(manifest, stream.device)
    if fused:
        from eesd.runtime.engines.torch_fused import fuse

        fuse(of_verify, of_draft)
    on_gpu = stream.on_gpu
    positions = manifest.gpu_slots
    tables = tuple(
        table.to(stream.device, dtype)
        for table in map(torch.tensor, rotary_tables(manifest.geometry, positions))
    )
    runner = partial(_runner, tables=(tables[0], tables[1]), stream=stream)
    memory = partial(
        RowMemory, manifest, [stream], grow=not on_gpu, spare=manifest.max_tree_nodes + ROWS
    )
    verify, draft = make_engines(
        manifest,
        [runner(of_verify, manifest.verify[0])],
        runner(of_draft, manifest.draft),
        memory,
        pad=on_gpu,
        multiple=ROWS,
        exact=exact,
    )
    assert draft is not None
    return verify, draft


def _runner(
    module: Draft | Verify,
    graph: GraphInfo,
    tables: tuple[torch.Tensor, torch.Tensor],
    stream: DeviceStream,
) -> TorchStageRunner:
    return TorchStageRunner(module.eval(), graph, tables, stream)


def _quantize(decoder: Decoder) -> None:
    """Replace the weights of the blocks and the LM head by random 4-bit levels. Layers that read
    the same input become one layer."""
    indices = range(decoder.geometry.num_layers)
    blocks = [
        [f"model.layers.{index}.{name}" for name in joint.split()]
        for index in indices
        for joint in JOINT
    ]
    for first, *others in (["lm_head"], *blocks):
        layers: list[Any] = [decoder.get_submodule(name) for name in (first, *others)]
        decoder.set_submodule(first, _quantized(layers))
        for name, layer in zip(others, layers[1:], strict=True):
            decoder.set_submodule(name, ComputedBefore(layer.out_features))


def _quantized(layers: Sequence[Any]) -> QuantizedLinear:
    weight = layers[0].weight
    inputs = layers[0].in_features
    outputs = sum(layer.out_features for layer in layers)
    shape = -(-outputs // PANEL), -(-inputs // (8 * WORDS)), PANEL, WORDS
    levels = torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, device=weight.device)
    scales = torch.full(
        (inputs // BLOCK, outputs), 0.2 * inputs**-0.5, dtype=weight.dtype, device=weight.device
    )
    return QuantizedLinear(
        QuantizedWeight(levels, scales, None, None, 4, 8), None, layers[0].out_features
    )


def _fill(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Fill norms with 1. Fill matrices with random values that make products about as large as
    their inputs."""
    for name, value in parameters:
        if value.ndim == 1:
            value.fill_(0 if name.endswith("bias") else 1)
        else:
            value.normal_(0, value.shape[1] ** -0.5)
