"""Check that graphs give the results of the torch modules, and that engines give the results of
their graphs.

In the first two checks, ONNX Runtime runs the graphs on the CPU. 16-bit weights and caches are
widened to float32.

* :func:`compare_graphs` runs after an export. It compares the graphs with the torch modules on a
  random token tree.
* :func:`compare_engines` runs after a build. It compares engines of any backend with the graphs, on
  a random prompt and a draft step.
* :func:`compare_texts` then compares engines with those of another backend, on a text long enough
  to reach each kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from eesd.common.manifest import MASKED, GraphInfo, Manifest
from eesd.common.quantization import EXIT_HEAD, UNQUANTIZED
from eesd.common.weights import (
    checkpoint_names,
    graph_name,
    stored_weight,
    weight_bytes,
)
from eesd.export.engine_dir import Head, weight_sources
from eesd.export.reference import (
    Difference,
    empty_cache,
    least_cosine,
    rows_of_slots,
    run_chain,
    run_stages,
)
from eesd.export.weights import TensorSource, joined, quantized
from eesd.export.widened import reference
from eesd.model.arrays import rounded, to_float32
from eesd.model.as_torch import as_torch
from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import Decoder, ExitHead, make_head
from eesd.model.graphs import Draft, Verify
from eesd.model.inputs import causal_inputs, empty_caches
from eesd.model.quantized import dequantize
from eesd.model.rotary import rotary_tables
from eesd.model.torch_ops import Inputs
from eesd.runtime.engines.backends import Engines, default_threads
from eesd.runtime.engines.base import Call
from eesd.runtime.engines.exactness import Exactness
from eesd.runtime.engines.trt_plans import attended_slots

LEAST_COSINE = {"float32": 0.99999, "float16": 0.999, "bfloat16": 0.99}
"""Lowest acceptable cosine by element type. bfloat16 has 8 bits of precision, float16 has 11."""

_TREE_TOKENS = 18
_TREE_SLOTS = 32
_ENGINE_PROMPT = 12
_LONG_TEXT = 2000
_TEXT_LENGTH = 64

Array = NDArray[np.float32]


@dataclass(frozen=True)
class QuantizationDrift:
    """Effect of quantization on a text that the unquantized model wrote.

    Attributes:
        logit_change: Root mean square of the change of the logits, divided by their standard
            deviation.
        same_token: Number of positions at which the most likely token stays the same.
        positions: Number of positions.
    """

    logit_change: float
    same_token: int
    positions: int


def compare_graphs(
    directory: Path, manifest: Manifest, checkpoint: Checkpoint, head: Head
) -> dict[str, Difference]:
    """Compare the graphs with the torch modules. Both use the stored weights, rounded or quantized.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        checkpoint: The base model.
        head: The exit head.

    Returns:
        The differences of ``draft`` and ``verify``.
    """
    torch.manual_seed(0)
    count = min(_TREE_TOKENS, manifest.max_seq_len)
    ids = torch.randint(0, manifest.geometry.vocab_size, (1, count))
    inputs = _random_tree(checkpoint, count)
    draft = Draft(
        *_stored_modules(checkpoint, head, manifest, draft=True), manifest.draft_top_k
    ).eval()
    found = {"draft": _difference(directory, manifest, [manifest.draft], draft, ids, inputs)}
    del draft  # before the other modules are loaded
    verify = Verify(*_stored_modules(checkpoint, head, manifest)).eval()
    return found | {
        "verify": _difference(directory, manifest, manifest.verify, verify, ids, inputs)
    }


def check_bits(directory: Path, manifest: Manifest) -> Exactness:
    """Whether ONNX Runtime gives a token's logits the same bits in calls of one, two and M + 1
    tokens. Runs four calls."""
    exactness = Exactness(manifest)
    exactness.check_quickly(reference(directory, manifest, manifest.verify, default_threads()))
    return exactness


@torch.no_grad()
def quantization_drift(manifest: Manifest, checkpoint: Checkpoint, head: Head) -> QuantizationDrift:
    """Measure the effect of quantization on a text that the unquantized model samples at
    temperature 1.

    Args:
        manifest: Manifest of the quantized engine directory.
        checkpoint: The base model.
        head: The exit head.
    """
    decoder, _ = _stored_modules(checkpoint, head, replace(manifest, quantization=UNQUANTIZED))
    ids, exact = _sampled_text(decoder, checkpoint, manifest)
    del decoder  # before the other model is loaded
    decoder, _ = _stored_modules(checkpoint, head, manifest)
    geometry = checkpoint.geometry
    length = len(ids)
    caches = empty_caches(geometry, 1, length)
    found = decoder(torch.tensor([ids]), causal_inputs(geometry, 1, length, length), caches)[0][0]
    deviation = exact.std(-1, correction=0).square().mean().sqrt()
    same = int((found.argmax(-1) == exact.argmax(-1)).sum())
    return QuantizationDrift(
        float((found - exact).square().mean().sqrt() / deviation), same, length
    )


def _sampled_text(
    decoder: Decoder, checkpoint: Checkpoint, manifest: Manifest
) -> tuple[list[int], Tensor]:
    """Samples tokens from a model at temperature 1. Returns the tokens, and the logits after each
    of them [n, V]."""
    geometry = checkpoint.geometry
    length = min(_TEXT_LENGTH, manifest.max_seq_len)
    generator = torch.Generator().manual_seed(0)
    caches = empty_caches(geometry, 1, length)
    ids = [checkpoint.config.bos_token_id or 0]
    rows = []
    for position in range(length):
        logits, caches = decoder(
            torch.tensor([ids[-1:]]), causal_inputs(geometry, 1, 1, length, position), caches
        )
        rows.append(logits[0, 0])
        ids.append(int(torch.multinomial(rows[-1].softmax(-1), 1, generator=generator)))
    return ids[:-1], torch.stack(rows)


def _stored_modules(
    checkpoint: Checkpoint, head: Head, manifest: Manifest, draft: bool = False
) -> tuple[Decoder, ExitHead]:
    """Returns the float32 modules of the verify or draft graph. They have the stored weights, which
    are rounded to the engine's type or quantized."""
    geometry = checkpoint.geometry
    sources = weight_sources(checkpoint, head, manifest.max_seq_len)
    with torch.device("meta"):
        modules = (
            Decoder(replace(geometry, tied_embeddings=False)),
            make_head(geometry, head.config, _TREE_SLOTS),
        )
    for module, prefix in zip(modules, ("", EXIT_HEAD), strict=True):
        state = {}
        for name, parameter in module.named_parameters():
            shape = tuple(parameter.shape)
            stored = graph_name(
                prefix + name, shape, geometry, draft, manifest.dtype, manifest.quantization
            )
            source = joined([sources[part] for part in checkpoint_names(prefix + name, geometry)])
            state[name] = _stored_value(stored, shape, source, manifest)
        module.load_state_dict(state, strict=False, assign=True)
    modules[1].draft_vocab = None if head.draft_vocab is None else as_torch(head.draft_vocab)
    if head.config.eagle:
        modules[1].cos, modules[1].sin = map(
            torch.tensor, rotary_tables(head.config.eagle.block, manifest.max_seq_len)
        )
    return modules


def _stored_value(
    name: str, shape: tuple[int, ...], source: TensorSource, manifest: Manifest
) -> Tensor:
    weight = stored_weight(
        name, shape, manifest.dtype, manifest.quantization, wide_norms=manifest.geometry.wide_norms
    )
    if weight.quantization is None:
        return as_torch(to_float32(rounded(source.read(), weight.dtype)))
    kind = weight.quantization.weights
    found = quantized(source, weight)
    return as_torch(dequantize(found, kind).T if weight.transposed else dequantize(found, kind, 1))


def _random_tree(checkpoint: Checkpoint, count: int) -> Inputs:
    """Make a prompt followed by a random tree. Together, they have ``count`` tokens. Each node sees
    the prompt, its ancestors and itself."""
    prompt = count - count // 3
    parents = [
        *range(-1, prompt - 1),
        *(int(torch.randint(prompt - 1, i, ())) for i in range(prompt, count)),
    ]
    visible = torch.eye(count, _TREE_SLOTS, dtype=torch.bool)
    positions = torch.zeros(count, dtype=torch.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
            positions[node] = positions[parent] + 1
    cos, sin = map(torch.tensor, rotary_tables(checkpoint.geometry, _TREE_SLOTS))
    mask = torch.zeros(count, _TREE_SLOTS).masked_fill(~visible, MASKED)
    return Inputs(cos, sin, positions[None], torch.zeros(1, dtype=torch.int64), mask[None, None])


@torch.no_grad()
def _difference(
    directory: Path,
    manifest: Manifest,
    stages: Sequence[GraphInfo],
    module: nn.Module,
    ids: Tensor,
    inputs: Inputs,
) -> Difference:
    """Compare a module with the graph or the stages exported from it."""
    caches = {
        index: empty_cache(manifest, _TREE_SLOTS) for graph in stages for index in graph.caches
    }
    module_caches = empty_caches(manifest.geometry, 1, _TREE_SLOTS, len(caches))
    expected = module(ids, inputs, module_caches)[0].numpy()
    masked = {
        name: getattr(inputs, name).numpy()
        for name in ("position_ids", "write_indices", "attn_mask")
    }
    logits, _ = run_stages(directory, stages, ids.numpy(), masked, caches)
    return Difference(float(np.abs(logits - expected).max()), float(np.abs(expected).max()))


def compare_engines_memory(manifest: Manifest) -> int:
    """Number of bytes of memory for the reference of :func:`compare_engines`. It needs the largest
    graph and its packed weights in float32."""
    wide = replace(manifest, dtype="float32", quantization=UNQUANTIZED)
    return 2 * max(weight_bytes(wide, graph) for graph in wide.graphs)


def compare_engines(engines: Engines, directory: Path, manifest: Manifest) -> dict[str, float]:
    """Compare engines with the graphs of a directory. Caches of all layers and exit blocks are
    compared.

    Args:
        engines: Verify and draft engines of any backend, or only the verify engine.
        directory: Directory of the graphs.
        manifest: Its manifest.

    Returns:
        The lowest cosine over all tokens. It covers the logits, keys and values of the verify and
        draft engines. A vector holds a token's logits, or the token's keys or values of all heads
        in one cache.
    """
    count = min(_ENGINE_PROMPT, manifest.max_tree_nodes + 1, manifest.max_seq_len - 1)
    tokens: list[int] = (
        np.random.default_rng(0).integers(manifest.geometry.vocab_size, size=count + 1).tolist()
    )
    [kv_cache] = engines.verify.new_kv_caches()
    caches = {index: empty_cache(manifest, count + 1) for index in range(manifest.num_caches)}
    cosines: dict[str, float] = {}

    def compare(kind: str, engine: Any, stages: Sequence[GraphInfo], first: int, stop: int) -> None:
        logits = engine.forward([Call(kv_cache, tokens[first:stop], range(first, stop), first)])[
            0
        ].logits.copy()
        expected, written = run_chain(directory, stages, tokens[first:stop], first, caches)
        cosines[f"{kind} logits"] = least_cosine(logits, expected)
        for part, name in enumerate(("keys", "values")):
            pairs = [(kv_cache.read(index)[part], cache[part]) for index, cache in written.items()]
            cosines[f"{kind} {name}"] = min(
                least_cosine(*(rows_of_slots(x, first, stop) for x in pair)) for pair in pairs
            )
        caches.update(written)

    compare("verify", engines.verify, manifest.verify, 0, count)
    if engines.draft is not None:
        compare("draft", engines.draft, [manifest.draft], count, count + 1)
    return cosines


def compare_texts(engines: Engines, expected: Engines, manifest: Manifest) -> dict[str, float]:
    """Compare engines with the engines of another backend on a random text.

    The prompt runs in pieces. A round and a draft step run at the end of each number of slots that
    a plan's attention can read, because attention may be wrong only for long texts.

    Args:
        engines: Verify and draft engines, or only the verify engine.
        expected: The engines of the other backend.
        manifest: Their manifest.

    Returns:
        The lowest cosine over all tokens, for the logits of each call and for the keys and values
        of one cache. This is the first cache with an unacceptable cosine, or the worst cache if all
        are acceptable.
    """
    nodes = manifest.max_tree_nodes + 1
    slots = attended_slots(manifest, manifest.verify[0])
    length = min(max(_LONG_TEXT, *slots[-2:-1], 0) + nodes, manifest.max_seq_len - 1)
    tokens: list[int] = (
        np.random.default_rng(0).integers(manifest.geometry.vocab_size, size=length + 1).tolist()
    )
    both = [(side, side.verify.new_kv_caches()[0]) for side in (engines, expected)]
    for _, kv_cache in both:
        kv_cache.reserve(length + 1)
    cosines: dict[str, float] = {}

    def run(draft: bool, first: int, stop: int, logits: bool = True) -> None:
        found = []
        for side, kv_cache in both:
            engine: Any = side.draft if draft else side.verify
            [outputs] = engine.forward(
                [Call(kv_cache, tokens[first:stop], range(first, stop), first, logits=logits)]
            )
            found.append(outputs.logits.copy())
        if logits:
            cosines[f"{'draft' if draft else 'verify'} logits after {first} tokens"] = least_cosine(
                found[0], found[1]
            )

    done = 0
    for stop in sorted({min(count, length) for count in slots}):
        first = max(stop - nodes, done)
        if done < first:
            run(False, done, first, logits=False)
        run(False, first, stop)
        if engines.draft is not None:
            run(True, stop, stop + 1)
        done = stop
    for part, name in enumerate(("keys", "values")):
        lowest: dict[int, float] = {}
        for index in range(manifest.num_caches):
            mine, theirs = (
                rows_of_slots(kv_cache.read(index)[part], 0, length) for _, kv_cache in both
            )
            lowest[index] = least_cosine(mine, theirs)
        wrong = (index for index, cosine in lowest.items() if cosine < LEAST_COSINE[manifest.dtype])
        index = next(wrong, min(lowest, key=lowest.__getitem__))
        cosines[f"{name} of {length} tokens in cache {index}"] = lowest[index]
    return cosines
