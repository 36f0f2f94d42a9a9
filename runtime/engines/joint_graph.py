"""A graph for sequences in several memories: one call reads the weights once for all of them.

Outside of attention tokens do not see each other. There the tokens of all parts lie one behind the other, [1, T, ...]. What
sees a sequence is there once for each part: masks, caches, attention. A part p is B sequences of n nodes over caches of S
slots, each with sizes of its own; its tensors have the names of the graph's with ``@p`` behind.

A part takes its keys, values and queries from those of all tokens, whose heads are rows of D numbers there: one Gather brings
them into the form that it needs. So the caller decides whether a part folds query heads, and fills up short sequences.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

QUERIES, KEYS, ATTENDED = "query_rows", "key_rows", "attended_rows"
"""Inputs. Of a part: which rows its queries are [B, heads, m] and its keys and values [B, KV, n]; row h T + t is head h of
token t. Of all parts: which rows of what they attended to are those of a token [T, heads], counted through."""
FOLDS = ("Reshape", "Concat", "Slice")
"""Operators that give queries the form in which attention takes them."""
OWN = ("attn_mask", "write_indices")
"""Inputs besides caches that every part has for itself."""


def join(model: onnx.ModelProto, parts: int) -> None:
    """Change a verify graph, or a stage of it, to one for ``parts`` parts. Weights stay where they are.

    Inputs are then ``input_ids`` [1, T] (or ``hidden`` [1, T, H]), ``position_ids`` [1, T], ``attended_rows`` [T, heads],
    ``logit_rows`` [R] of the tokens, and for each part ``query_rows@p`` [B, heads, m], ``key_rows@p`` [B, KV, n],
    ``write_indices@p`` [B], ``attn_mask@p`` [B, 1, m, S], and ``key_i@p``, ``value_i@p`` [B, KV, S, D]. Outputs are ``logits``
    [1, R, V] (or ``hidden_out`` [1, T, H]), and the caches, ``key_i_out@p`` and ``value_i_out@p``.
    """
    _Joiner(model.graph, range(parts)).join()


def name_of(tensor: str, part: int) -> str:
    """The name of a part's tensor."""
    return f"{tensor}@{part}"


class _Joiner:
    def __init__(self, graph: onnx.GraphProto, parts: range) -> None:
        self._graph, self._parts = graph, parts
        self._producers = {output: node for node in graph.node for output in node.output}
        self._constants = {
            tensor.name: numpy_helper.to_array(tensor)
            for tensor in graph.initializer
            if tensor.data_location != TensorProto.EXTERNAL and tensor.data_type == TensorProto.INT64
        }
        written = [node for node in graph.node if node.op_type == "TensorScatter"]
        self._caches = {name for node in written for name in (node.input[0], node.output[0])}
        self._attended: dict[str, str] = {}
        """What attention gives, by the Reshape that makes rows [B, n, W] of it."""
        for node in graph.node:
            if node.op_type == "Attention":
                self._attended[self._rows_behind(node.output[0])] = node.output[0]

    def join(self) -> None:
        graph = self._graph
        outputs = [new for value in graph.output for new in self._io(value)]
        nodes = _needed([new for node in graph.node for new in self._replace(node)], [value.name for value in outputs])
        used = {name for node in nodes for name in node.input}
        inputs = [new for value in graph.input for new in self._io(value) if new.name in used]
        if ATTENDED in used:
            inputs.append(_integers(ATTENDED, ["T", "heads"]))
        for part in self._parts:
            for name, sizes in ((QUERIES, ("B", "heads", "m")), (KEYS, ("B", "KV", "n"))):
                if name_of(name, part) in used:
                    inputs.append(_integers(name_of(name, part), [name_of(size, part) for size in sizes]))
        for field, values in ((graph.node, nodes), (graph.input, inputs), (graph.output, outputs)):
            del field[:]
            field.extend(values)
        del graph.value_info[:]

    def _rows_behind(self, value: str) -> str:
        """The rows [B, n, W] that are made of what attention gives."""
        while True:
            [user] = [node for node in self._graph.node if value in node.input]
            value = user.output[0]
            if user.op_type == "Reshape" and len(self._constants[user.input[1]]) == 3:
                return value
            assert user.op_type in (*FOLDS, "Transpose"), f"{user.op_type} behind attention"

    def _replace(self, node: NodeProto) -> Iterator[NodeProto]:
        """What stands for a node of the graph. What nobody needs then is among it."""
        if node.op_type == "TensorScatter":
            yield from self._write(node)
        elif node.op_type == "Attention":
            yield from self._attend(node)
        elif node.output[0] in self._attended:
            yield from self._collect(node, self._attended[node.output[0]])
        else:
            yield node

    def _write(self, node: NodeProto) -> Iterator[NodeProto]:
        """Each part writes its keys or values [B, KV, n, D] into its caches."""
        cache, new, indices = node.input
        yield from self._gather(new, KEYS)
        for part in self._parts:
            yield _copy(node, [name_of(name, part) for name in (cache, new, indices)], part)

    def _attend(self, node: NodeProto) -> Iterator[NodeProto]:
        """Attention of each part, over its queries [B, heads, m, D]."""
        queries, keys, values, _ = node.input
        while self._producers[queries].op_type in FOLDS:
            queries = self._producers[queries].input[0]
        yield from self._gather(queries, QUERIES)
        for part in self._parts:
            yield _copy(node, [name_of(name, part) for name in (queries, keys, values, "attn_mask")], part)

    def _gather(self, heads: str, rows: str) -> Iterator[NodeProto]:
        """Each part takes the heads [1, heads, T, D] of its tokens, by its input ``rows``."""
        everyone = f"{heads}@rows"
        yield helper.make_node("Reshape", [heads, self._heads()], [everyone])
        for part in self._parts:
            yield helper.make_node("Gather", [everyone, name_of(rows, part)], [name_of(heads, part)], axis=0)

    def _collect(self, node: NodeProto, attended: str) -> Iterator[NodeProto]:
        """The rows [1, T, heads D] of the tokens, from what the parts attended to."""
        width = int(self._constants[node.input[1]][2])
        rows = [f"{name_of(attended, part)}@rows" for part in self._parts]
        for part, own in zip(self._parts, rows, strict=True):
            yield helper.make_node("Reshape", [name_of(attended, part), self._heads()], [own])
        everyone, heads = f"{attended}@rows", f"{attended}@heads"
        yield helper.make_node("Concat", rows, [everyone], axis=0)
        yield helper.make_node("Gather", [everyone, ATTENDED], [heads], axis=0)
        yield helper.make_node("Reshape", [heads, self._constant("joined", [1, -1, width])], [node.output[0]])

    def _heads(self) -> str:
        """The shape of heads one behind the other."""
        [size] = {value.type.tensor_type.shape.dim[3].dim_value for value in self._graph.input if value.name in self._caches}
        return self._constant("heads", [-1, size])

    def _constant(self, kind: str, values: list[int]) -> str:
        name = "_".join([kind, *map(str, values)])
        if name not in self._constants:
            self._constants[name] = np.array(values, np.int64)
            self._graph.initializer.append(numpy_helper.from_array(self._constants[name], name))
        return name

    def _io(self, value: ValueInfoProto) -> Iterator[ValueInfoProto]:
        """What stands for an input or output of the graph."""
        own = value.name in self._caches or value.name in OWN
        sizes: list[str | int] = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for part in self._parts if own else (0,):
            name = name_of(value.name, part) if own else value.name
            known: dict[str | int, str | int]
            known = {"B": name_of("B", part), "n": name_of("m", part), "S": name_of("S", part)} if own else {"B": 1, "n": "T"}
            shape = [known.get(size, size) for size in sizes]
            yield helper.make_tensor_value_info(name, value.type.tensor_type.elem_type, shape)


def _needed(nodes: Sequence[NodeProto], outputs: Sequence[str]) -> list[NodeProto]:
    """The nodes without those whose results nobody needs."""
    needed, kept = {*outputs}, list[NodeProto]()
    for node in reversed(nodes):
        if needed & {*node.output}:
            needed |= {*node.input}
            kept.append(node)
    return kept[::-1]


def _copy(node: NodeProto, inputs: Sequence[str], part: int) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.name = ""
    copy.input[:] = inputs
    copy.output[:] = [name_of(name, part) for name in node.output]
    return copy


def _integers(name: str, shape: Sequence[str]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT64, shape)
