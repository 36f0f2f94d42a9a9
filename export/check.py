"""The parity check after an export: both graphs through ONNX Runtime against the torch module, on a random token tree."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import ExternalDataInfo
from torch import Tensor, nn

from eesd.common.manifest import MASKED, GraphInfo, Manifest
from eesd.common.weights import stored_weight
from eesd.export.engine_dir import Head, weight_sources
from eesd.export.memory import graph_weights
from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import Decoder, Inputs, causal_inputs, empty_caches, rotary_tables
from eesd.model.exit_head import ExitHead
from eesd.model.graphs import Draft, Verify
from eesd.model.quantize import dequantize, quantize

PROMPT, NODES, SLOTS = 12, 6, 32
TEXT = 64

NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)

TOLERANCE = 1e-3
"""Largest difference of a logit, relative to the largest logit, that float32 arithmetic in another order explains."""


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference of a graph's logits, and the largest logit to judge it by."""

    largest: float
    scale: float

    @property
    def acceptable(self) -> bool:
        return self.largest <= TOLERANCE * max(1.0, self.scale)


@dataclass(frozen=True)
class Drift:
    """What quantization does to a text that the model wrote: how far it moves the logits, as a share of their spread (both root
    mean square), and at how many of its places the likeliest token stays the same."""

    moved: float
    same: int
    places: int


def memory_needed(manifest: Manifest) -> int:
    """Bytes that the check takes: the module, the session, and the session's packed copy, all in float32."""
    wide = replace(manifest, dtype="float32", quantization=None)
    weights: dict[str, int] = {}
    for graph in wide.graphs:
        weights |= graph_weights(wide, graph)
    return 3 * sum(weights.values())


def check_engine(directory: Path, manifest: Manifest, checkpoint: Checkpoint, head: Head) -> dict[str, Difference]:
    """Differences for ``draft`` and ``verify``. Graphs of 16-bit types are widened; both sides use
    the weights as they are stored, rounded or quantized."""
    torch.manual_seed(0)
    decoder, exit_head = _stored_modules(checkpoint, head, manifest)
    programs = {
        "draft": Draft(decoder, exit_head, manifest.draft_top_k).eval(),
        "verify": Verify(decoder, exit_head).eval(),
    }
    ids = torch.randint(0, manifest.geometry.vocab_size, (1, PROMPT + NODES))
    inputs = _random_tree(checkpoint, getattr(torch, manifest.dtype))
    return {
        "draft": _compare(directory, [manifest.draft], programs["draft"], ids, inputs, checkpoint),
        "verify": _compare(directory, manifest.verify, programs["verify"], ids, inputs, checkpoint),
    }


@torch.no_grad()
def quantization_drift(manifest: Manifest, checkpoint: Checkpoint, head: Head) -> Drift:
    """Let the model write a text, at temperature 1 from one token on, and ask the quantized one about each place of it."""
    geometry, places = checkpoint.geometry, min(TEXT, manifest.max_seq_len)
    generator = torch.Generator().manual_seed(0)
    decoder, _ = _stored_modules(checkpoint, head, replace(manifest, quantization=None))
    caches, ids, rows = empty_caches(geometry, 1, places, geometry.num_layers), [checkpoint.config.bos_token_id or 0], []
    for place in range(places):
        logits, caches = decoder(torch.tensor([ids[-1:]]), causal_inputs(geometry, 1, 1, places, place), caches)
        rows.append(logits[0, 0])
        ids.append(int(torch.multinomial(rows[-1].softmax(-1), 1, generator=generator)))
    exact = torch.stack(rows)
    del decoder  # or both would be in memory
    decoder, _ = _stored_modules(checkpoint, head, manifest)
    caches = empty_caches(geometry, 1, places, geometry.num_layers)
    found = decoder(torch.tensor([ids[:-1]]), causal_inputs(geometry, 1, places, places), caches)[0][0]
    spread = exact.std(-1, correction=0).square().mean().sqrt()
    same = int((found.argmax(-1) == exact.argmax(-1)).sum())
    return Drift(float((found - exact).square().mean().sqrt() / spread), same, places)


def _stored_modules(checkpoint: Checkpoint, head: Head, manifest: Manifest) -> tuple[Decoder, ExitHead]:
    """The modules in float32, with the weights that the directory holds: rounded to its type, and quantized if they are."""
    sources = weight_sources(checkpoint, head, manifest.max_seq_len)
    with torch.device("meta"):
        modules = Decoder(checkpoint.geometry), ExitHead(checkpoint.geometry, head.config)
    for module, prefix in zip(modules, ("", "exit_head."), strict=True):
        names = [name for name, _ in module.named_parameters()]
        state = {name: _as_stored(prefix + name, sources[prefix + name].read(), manifest) for name in names}
        module.load_state_dict(state, strict=False, assign=True)
    if checkpoint.geometry.tied_embeddings:
        modules[0].lm_head.weight = modules[0].model.embed_tokens.weight
    return modules


def _as_stored(name: str, tensor: Tensor, manifest: Manifest) -> Tensor:
    weight = stored_weight(name, tensor.shape, manifest.dtype, manifest.quantization)
    dtype: torch.dtype = getattr(torch, manifest.dtype)
    if weight.quantization is None:
        return tensor.to(dtype).float()
    levels, scales = quantize(tensor, weight.quantization.weights, dtype)
    return dequantize(levels, scales.float(), weight.quantization.weights).t()


def _random_tree(checkpoint: Checkpoint, dtype: torch.dtype) -> Inputs:
    """A prompt and behind it a random tree, in one pass: each node sees the prompt, its ancestors and itself."""
    count = PROMPT + NODES
    parents = [*range(-1, PROMPT - 1), *(int(torch.randint(PROMPT - 1, i, ())) for i in range(PROMPT, count))]
    visible = torch.eye(count, SLOTS, dtype=torch.bool)
    positions = torch.zeros(count, dtype=torch.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
            positions[node] = positions[parent] + 1
    cos, sin = (table.to(dtype).float() for table in rotary_tables(checkpoint.geometry, SLOTS))
    mask = torch.zeros(count, SLOTS).masked_fill(~visible, MASKED)
    return Inputs(cos, sin, positions[None], torch.zeros(1, dtype=torch.int64), mask[None, None])


@torch.no_grad()
def _compare(
    directory: Path, stages: Sequence[GraphInfo], program: nn.Module, ids: Tensor, inputs: Inputs, checkpoint: Checkpoint
) -> Difference:
    """The whole program against its graph, or against the chain of the graph's stages."""
    # Each side gets caches of its own: the module writes into those that it is given.
    caches = empty_caches(checkpoint.geometry, 1, SLOTS, sum(len(info.caches) for info in stages))
    shape = caches[0][0].shape
    expected = program(ids, inputs, caches)[0].numpy()
    feeds = {
        "position_ids": inputs.position_ids.numpy(),
        "write_indices": inputs.write_indices.numpy(),
        "attn_mask": inputs.attn_mask.numpy(),
    }
    actual: NDArray[Any] = ids.numpy()
    for info in stages:
        own = {tensor.name: np.zeros(shape, np.float32) for tensor in info.inputs[4:]}
        actual = _run(directory / info.file, feeds | own | {info.inputs[0].name: actual})
    return Difference(float(np.abs(actual - expected).max()), float(np.abs(expected).max()))


def _run(path: Path, feeds: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    """A graph's first output."""
    return next(iter(run_widened(path, feeds).values()))


def run_widened(path: Path, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """A graph's outputs from ONNX Runtime's CPU kernels; 16-bit weights and caches are widened to float32, in memory."""
    options = ort.SessionOptions()
    options.log_severity_level = 3  # it would warn that caches are copied, which is what a check wants
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # int4 and int8 kernels round on their own
    model = onnx.load(path, load_external_data=False)
    narrow = [tensor for tensor in model.graph.initializer if tensor.data_type in NARROW]
    weights = [ort.OrtValue.ortvalue_from_numpy(_widened(tensor, path.parent)) for tensor in narrow]
    if narrow:
        options.add_external_initializers([tensor.name for tensor in narrow], weights)
    for tensor in narrow:
        tensor.data_type = TensorProto.FLOAT
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type in NARROW:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    del model.graph.value_info[:]
    # Beside the weights: quantized ones are still read from there, by their relative path.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".onnx") as file:
        file.write(model.SerializeToString())
        file.flush()
        session = ort.InferenceSession(file.name, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in model.graph.output]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _widened(tensor: TensorProto, directory: Path) -> NDArray[np.float32]:
    """A weight read from its file; onnx's own reader refuses files with more than one hard link."""
    info = ExternalDataInfo(tensor)
    with (directory / info.location).open("rb") as file:
        file.seek(info.offset or 0)
        loaded = TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=file.read(info.length))
    return numpy_helper.to_array(loaded).astype(np.float32)
