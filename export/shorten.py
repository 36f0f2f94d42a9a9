"""A model cut to its first layers: an engine directory of its own, whose graphs alone are new and whose weights are links.

What is built of it and how it computes tells in minutes what building the whole model would show in hours.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import GraphProto, ModelProto, NodeProto
from onnx.helper import make_graph, make_model

from eesd.export.links import link
from eesd.export.manifest import NAME, FileInfo, GraphInfo, Manifest, TensorInfo, sha256_of
from eesd.runtime.errors import EESDError

VERIFY = "verify.onnx"


@contextmanager
def shortened(directory: Path, manifest: Manifest, layers: int) -> Iterator[tuple[Path, Manifest]]:
    """For the time of the block, an engine directory of the first ``layers`` base layers, norm and LM head, and the same draft.

    It lies inside ``directory``, where hard links are sure to reach. A model in stages comes out in one piece, so the layers
    must be of the first stage. Raises :class:`EESDError` for a number of layers that cannot be cut to.
    """
    most = min(manifest.stage_layers[0].stop, manifest.num_layers - 1)
    if not manifest.exit_layer <= layers <= most:
        raise EESDError(
            f"--layers {layers} cannot be: {directory} has {manifest.num_layers} layers, the draft uses the first "
            f"{manifest.exit_layer}, and a shortened model may have up to {most}."
        )
    short = Path(tempfile.mkdtemp(prefix=".short-", dir=directory))
    try:
        yield short, _write(directory, manifest, layers, short)
    finally:
        shutil.rmtree(short, ignore_errors=True)


def _write(directory: Path, manifest: Manifest, layers: int, short: Path) -> Manifest:
    names = _new_names(manifest, layers)
    first, last = (onnx.load(directory / manifest.verify[i].file, load_external_data=False) for i in (0, -1))
    draft = onnx.load(directory / manifest.draft.file, load_external_data=False)
    exits = range(manifest.num_layers, manifest.num_caches)
    graphs = {manifest.draft.file: draft, VERIFY: _cut(first, last, layers, [*range(layers), *exits])}
    for file, model in graphs.items():
        _rename(model.graph.node, names)
        for value in (*model.graph.input, *model.graph.output):
            value.name = names.get(value.name, value.name)
        del model.graph.value_info[:]  # they go by the old names
        onnx.save(model, short / file)
    old = {graph.file for graph in manifest.graphs}
    kept = {name: info for name, info in manifest.files.items() if name not in old}
    for name in (*kept, *manifest.linked):
        link(directory / name, short / name, "try it on another one")
    written = {file: FileInfo((short / file).stat().st_size, sha256_of(short / file)) for file in graphs}
    cut = replace(
        manifest,
        model=f"{manifest.model}, {layers} layers",
        num_layers=layers,
        draft=_info(manifest.draft.file, manifest.draft, manifest.draft, [*range(manifest.exit_layer)], layers, manifest),
        verify=(_info(VERIFY, manifest.verify[0], manifest.verify[-1], [*range(layers)], layers, manifest),),
        files=kept | written,
        plans={},
    )
    (short / NAME).write_text(cut.to_json())
    return cut


def _new_names(manifest: Manifest, layers: int) -> dict[str, str]:
    """The exit blocks' caches, which follow those of the base layers, get the numbers behind the fewer layers."""
    return {
        f"{part}_{manifest.num_layers + block}{end}": f"{part}_{layers + block}{end}"
        for block in range(manifest.exit_blocks)
        for part in ("key", "value")
        for end in ("", "_out")
    }


def _info(file: str, takes: GraphInfo, gives: GraphInfo, own: list[int], layers: int, manifest: Manifest) -> GraphInfo:
    """A graph's description with what one graph ``takes`` and another one ``gives`` besides caches."""
    caches = [*own, *range(layers, layers + manifest.exit_blocks)]
    shape = ("B", manifest.num_kv_heads, "S", manifest.head_dim)
    kv = [TensorInfo(f"{part}_{index}", shape, manifest.dtype) for index in caches for part in ("key", "value")]
    results = gives.outputs[: len(gives.outputs) - 2 * len(gives.caches)]
    out = [replace(tensor, name=f"{tensor.name}_out") for tensor in kv]
    return GraphInfo(file, tuple(caches), (*takes.inputs[:4], *kv), (*results, *out))


def _cut(first: ModelProto, last: ModelProto, layers: int, caches: list[int]) -> ModelProto:
    """``first`` up to layer ``layers``, with those of its caches that are named, and behind it norm and LM head of ``last``
    (the same graph, loaded once more, where there is one stage)."""
    body, tail = first.graph, last.graph
    own = {f"{part}_{index}" for index in caches for part in ("key", "value")}
    inputs = [value for value in body.input if value.name in own or not value.name.startswith(("key_", "value_"))]
    written = [value for value in body.output if value.name.removesuffix("_out") in own]
    hidden = _into_norm(body, f"model.layers.{layers}.input_layernorm.weight") or "hidden_out"
    final = _into_norm(tail, "model.norm.weight")
    logits = tail.output[0]
    before = _needed(body, {hidden, *(value.name for value in written)}, None)
    behind = _needed(tail, {logits.name}, final)
    others = {name: f"tail_{name}" for node in behind for name in node.output if name != logits.name}
    _rename(behind, others | {str(final): hidden})
    for node in behind:
        node.name = f"tail_{node.name}"  # the graph of another stage may have used the name, too
    nodes = [*before, *behind]
    used = {name for node in nodes for name in node.input}
    weights = {tensor.name: tensor for tensor in (*tail.initializer, *body.initializer) if tensor.name in used}
    graph = make_graph(nodes, body.name, inputs, [logits, *written], list(weights.values()))
    return make_model(graph, opset_imports=first.opset_import, ir_version=first.ir_version, producer_name="eesd")


def _into_norm(graph: GraphProto, weight: str) -> str | None:
    """The value that the norm with this weight takes."""
    return next((node.input[0] for node in graph.node if weight in node.input[1:]), None)


def _needed(graph: GraphProto, wanted: set[str], stop: str | None) -> list[NodeProto]:
    """The nodes that ``wanted`` values are computed by, in order, from the value ``stop`` on."""
    nodes = []
    for node in reversed(graph.node):
        if wanted & set(node.output) - {stop}:
            nodes.append(node)
            wanted = wanted | set(node.input)
    return nodes[::-1]


def _rename(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> None:
    """Give values other names; what makes one that is renamed gets a name of its own, too."""
    for node in nodes:
        if any(name in names for name in node.output):
            node.name = f"{node.name}_{names[node.output[0]]}"
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
