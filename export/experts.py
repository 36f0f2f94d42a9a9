"""Write down all experts of a mixture in a graph, of which the first one was traced."""

from typing import TypeGuard

import onnx_ir as ir
from torch import nn

from eesd.export.constants import constant
from eesd.model.feed_forward import COLUMN_OF_EXPERT, SUM_OF_EXPERTS, Mixture

_FIRST = ".mlp.experts.0."


def keep_first_experts(module: nn.Module) -> None:
    """Take away what is not traced: each weight of a module takes its time."""
    for mixture in module.modules():
        if isinstance(mixture, Mixture):
            del mixture.experts[1:]


def repeat_experts(graph: ir.Graph) -> None:
    """Repeat for each expert what stands between the columns of the first one and the sum, with the
    expert's own weights."""
    own, nodes = set[ir.Value](), list[ir.Node]()
    for node in list(graph):
        kind = f"{node.domain}::{node.op_type}"
        if kind == SUM_OF_EXPERTS:
            _repeat(graph, node, nodes)
            own, nodes = set(), []
        elif kind == COLUMN_OF_EXPERT or any(
            value in own or _is_weight(value) for value in node.inputs
        ):
            own.update(node.outputs)
            nodes.append(node)


def _is_weight(value: ir.Value | None) -> TypeGuard[ir.Value]:
    return value is not None and value.is_initializer() and _FIRST in str(value.name)


def _repeat(graph: ir.Graph, total: ir.Node, nodes: list[ir.Node]) -> None:
    """Put the sum over the experts in the place of ``total``, whose input the ``nodes`` compute for
    the first one."""
    columns = [node for node in nodes if f"{node.domain}::{node.op_type}" == COLUMN_OF_EXPERT]
    shapes = [node.inputs[0].shape for node in columns if node.inputs[0] is not None]
    assert shapes[0] is not None
    count = shapes[0][-1]
    assert isinstance(count, int)
    summed: ir.Value | None = None
    sizes = constant(graph, "split", [1] * count)
    splits = {
        node: ir.node("Split", [node.inputs[0], sizes], {"axis": -1}, num_outputs=count)
        for node in columns
    }
    made = list(splits.values())
    for expert in range(count):
        copies: dict[ir.Value | None, ir.Value | None] = {
            node.outputs[0]: split.outputs[expert] for node, split in splits.items()
        }
        for node in nodes:
            if node in splits:
                continue
            inputs = [
                _weight_of(graph, value, expert) if _is_weight(value) else copies.get(value, value)
                for value in node.inputs
            ]
            copy = ir.node(
                node.op_type, inputs, dict(node.attributes), num_outputs=len(node.outputs)
            )
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                new.shape, new.type, copies[old] = old.shape, old.type, new
            made.append(copy)
        added = copies[total.inputs[0]]
        if summed is not None:
            made.append(ir.node("Add", [summed, added]))
            added = made[-1].outputs[0]
        summed = added
    assert summed is not None
    summed.name, summed.shape, summed.type = (
        total.outputs[0].name,
        total.outputs[0].shape,
        total.outputs[0].type,
    )
    graph.insert_before(total, made)
    total.outputs[0].replace_all_uses_with(summed)
    graph.remove([*reversed(nodes), total], safe=True)


def _weight_of(graph: ir.Graph, first: ir.Value, expert: int) -> ir.Value:
    """The weight of an expert, by that of the first one."""
    name = str(first.name).replace(_FIRST, f".mlp.experts.{expert}.")
    if name not in graph.initializers:
        graph.initializers[name] = ir.val(name, dtype=first.dtype, shape=first.shape)
    return graph.initializers[name]
