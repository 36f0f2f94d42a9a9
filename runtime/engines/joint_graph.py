"""A graph for sequences in several memories: one call reads the weights once for all of them.

Outside of attention tokens do not see each other. There the tokens of all parts lie one behind the other, [1, T, ...]. What
sees a sequence is there once for each part: positions, masks, caches, attention. A part p is B sequences of n nodes over caches
of S slots, each with sizes of its own; its tensors have the names of the graph's with ``@p`` behind. There, and only there, a
sequence with fewer nodes is filled up to n.
"""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

PER_SEQUENCE = ("Attention", "TensorScatter")
"""Operators that see the tokens of one sequence."""
SIZES, NODES, ORDER = "rows", "nodes", "order"
"""Inputs. Of a part: the sizes [B, n], and which of the T tokens its nodes are [B, n]. Of all parts: which of their nodes the
tokens are [T], counted through."""


def join(model: onnx.ModelProto, parts: int) -> None:
    """Change a verify graph, or a stage of it, to one for ``parts`` parts. Weights stay where they are.

    Inputs are then ``input_ids`` [1, T] (or ``hidden`` [1, T, H]), ``order`` [T], ``logit_rows`` [R] of the tokens, and for
    each part ``rows@p`` [2], ``nodes@p`` and ``position_ids@p`` [B, n], ``write_indices@p`` [B], ``attn_mask@p`` [B, 1, n, S],
    and ``key_i@p``, ``value_i@p`` [B, KV, S, D]. Outputs are ``logits`` [1, R, V] (or ``hidden_out`` [1, T, H]), and the
    caches, ``key_i_out@p`` and ``value_i_out@p``.
    """
    _Joiner(model.graph, parts).join()


def name_of(tensor: str, part: int) -> str:
    """The name of a part's tensor."""
    return f"{tensor}@{part}"


class _Joiner:
    def __init__(self, graph: onnx.GraphProto, parts: int) -> None:
        self._graph, self._parts = graph, range(parts)
        self._constants = {
            tensor.name: numpy_helper.to_array(tensor)
            for tensor in graph.initializer
            if tensor.data_location != TensorProto.EXTERNAL and tensor.data_type == TensorProto.INT64
        }
        self._producers = {output: node for node in graph.node for output in node.output}
        self._inputs = {value.name for value in graph.input}
        self._shapes = set[str]()
        """Target shapes that are computed."""
        self._own = set[str]()
        """Values that every part has for itself."""

    def join(self) -> None:
        graph = self._graph
        self._find_own()
        nodes = [new for node in graph.node for new in self._replace(node)]
        inputs = [new for value in graph.input for new in self._io(value)]
        outputs = [new for value in graph.output for new in self._io(value)]
        inputs.append(_integers(ORDER, ["T"]))
        for part in self._parts:
            inputs += [
                _integers(name_of(SIZES, part), [2]),
                _integers(name_of(NODES, part), [name_of("B", part), name_of("n", part)]),
            ]
        for field, values in ((graph.node, nodes), (graph.input, inputs), (graph.output, outputs)):
            del field[:]
            field.extend(values)
        del graph.value_info[:]

    def _find_own(self) -> None:
        """Find what every part has for itself: what leads from the tokens' rows to attention, and from there back to rows."""
        waiting = []
        for node in self._graph.node:
            if node.op_type in PER_SEQUENCE:
                waiting += node.output
            if node.op_type == "Attention":
                waiting.append(self._rows_behind(node.output[0]))
        while waiting:
            value = waiting.pop()
            if value in self._own or not (value in self._producers or value in self._inputs):
                continue  # known, or a weight
            self._own.add(value)
            node = self._producers.get(value)
            if node is not None:
                self._own |= {*node.output}
                waiting += [] if self._divides(node) else [name for name in node.input if name]

    def _rows_behind(self, value: str) -> str:
        """The rows [B, n, ...] that Reshape and Transpose make of what attention gives."""
        while True:
            [user] = [node for node in self._graph.node if value in node.input]
            value = user.output[0]
            if self._joins(user):
                return value
            assert user.op_type in ("Reshape", "Transpose"), f"{user.op_type} behind attention"

    def _divides(self, node: NodeProto) -> bool:
        """Whether a node divides rows [B, n, W] into heads [B, n, heads, D]."""
        shape = self._target(node)
        return len(shape) == 4 and shape[:2] == [0, 0]

    def _joins(self, node: NodeProto) -> bool:
        """Whether a node joins heads to rows."""
        return len(self._target(node)) == 3

    def _target(self, node: NodeProto) -> list[int]:
        """The constant target shape of a Reshape; of other nodes nothing."""
        return [int(size) for size in self._constants.get(node.input[1], ())] if node.op_type == "Reshape" else []

    def _replace(self, node: NodeProto) -> Iterator[NodeProto]:
        """What stands for a node of the graph."""
        if node.output[0] not in self._own:
            yield node
        elif self._divides(node):
            yield from self._divide(node)
        else:
            copies = [self._copy(node, part) for part in self._parts]
            if self._joins(node):
                width = self._constant("joined", [1, -1, self._target(node)[2]])
                for copy in copies:
                    copy.input[1] = width
                nodes = f"{node.output[0]}@"
                copies.append(helper.make_node("Concat", [copy.output[0] for copy in copies], [nodes], axis=1))
                copies.append(helper.make_node("Gather", [nodes, ORDER], [node.output[0]], axis=1))
            yield from copies

    def _divide(self, node: NodeProto) -> Iterator[NodeProto]:
        """Divide rows [1, T, W] into the heads [B, n, heads, D] of each part."""
        heads = self._constant("heads", self._target(node)[2:])
        for part in self._parts:
            divided = name_of(node.output[0], part)
            rows, shape = f"{divided}@", name_of(heads, part)
            if shape not in self._shapes:
                self._shapes.add(shape)
                yield helper.make_node("Concat", [name_of(SIZES, part), heads], [shape], axis=0)
            yield helper.make_node("Gather", [node.input[0], name_of(NODES, part)], [rows], axis=1)
            yield helper.make_node("Reshape", [rows, shape], [divided])

    def _copy(self, node: NodeProto, part: int) -> NodeProto:
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.name = ""
        for names in (copy.input, copy.output):
            names[:] = [name_of(name, part) if name in self._own else name for name in names]
        return copy

    def _constant(self, kind: str, values: list[int]) -> str:
        name = "_".join([kind, *map(str, values)])
        if name not in self._constants:
            self._constants[name] = np.array(values, np.int64)
            self._graph.initializer.append(numpy_helper.from_array(self._constants[name], name))
        return name

    def _io(self, value: ValueInfoProto) -> Iterator[ValueInfoProto]:
        """What stands for an input or output of the graph."""
        own = value.name in self._own
        sizes: list[str | int] = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for part in self._parts if own else (0,):
            name = name_of(value.name, part) if own else value.name
            known: dict[str | int, str | int]
            known = {size: name_of(size, part) for size in ("B", "n", "S")} if own else {"B": 1, "n": "T"}
            shape = [known.get(size, size) for size in sizes]
            yield helper.make_tensor_value_info(name, value.type.tensor_type.elem_type, shape)


def _integers(name: str, shape: list[str | int]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT64, shape)
