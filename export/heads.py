"""Attention that folds query heads for a few nodes, and keeps them apart for many.

Folding the heads of a group into queries (:func:`~eesd.model.decoder.fold_mask`) reads each cache
once, which is faster for the rounds of a batch. A piece of a prompt takes half the time with heads
apart: ONNX Runtime gives each head to one thread, and few heads are no even share. From two nodes
on both give the same bits.
"""

import onnx_ir as ir

from eesd.export.constants import constant, values_of

FEW_NODES = 3
"""Query heads are folded in calls of B sequences with at most this many times B nodes each; see
docs/decisions/0058."""


def part_heads(graph: ir.Graph) -> None:
    """Let a verify graph with folded heads keep them apart in calls with many nodes.

    The shape of the queries, and how often a mask is repeated, are then chosen in the graph: by two
    ``Where``, the only ones there, whose last input is for few nodes. A graph that folds no heads
    stays as it is.
    """
    attentions = [node for node in graph if node.op_type == "Attention"]
    concats = list(
        dict.fromkeys(_producer(node.inputs[3]) for node in attentions if _is_made(node.inputs[3]))
    )
    concats = [node for node in concats if node.op_type == "Concat" and len({*node.inputs}) == 1]
    if not concats:  # without groups a mask has the first query's row twice
        return
    first = min(concats, key=list(graph).index)
    folds, group = [_producer(node.inputs[0]) for node in attentions], len(first.inputs)
    folded = folds[0].inputs[1]
    batch, kv_heads, nodes, head_dim = values_of(folded)
    apart = constant(graph, "reshape", [batch, kv_heads * group, nodes, head_dim])
    choosing, many = _many_nodes(graph)
    shape = ir.node("Where", [many, apart, folded])
    times = ir.node(
        "Where",
        [
            many,
            constant(graph, "repeats", [1, 1, 1, 1]),
            constant(graph, "repeats", [1, 1, group, 1]),
        ],
    )
    graph.insert_before(first, [*choosing, shape, times])
    for concat in concats:
        mask, old = concat.inputs[0], concat.outputs[0]
        assert mask is not None and mask.shape is not None
        repeated = ir.node("Tile", [mask, times.outputs[0]])
        graph.insert_before(concat, [repeated])
        new = repeated.outputs[0]
        new.name, new.type, new.shape = (
            old.name,
            old.type,
            ir.Shape([mask.shape[0], 1, "queries", mask.shape[3]]),
        )
        old.replace_all_uses_with(new)
        graph.remove(concat, safe=True)
    for fold in folds:
        fold.replace_input_with(1, shape.outputs[0])
    for node in (*folds, *attentions):
        node.outputs[0].shape = ir.Shape(["B", "heads", "queries", head_dim])


def _is_made(value: ir.Value | None) -> bool:
    return value is not None and value.producer() is not None


def _many_nodes(graph: ir.Graph) -> tuple[list[ir.Node], ir.Value]:
    """Nodes that compute whether a call has many nodes, [1], from the positions [B, n]."""
    [positions] = [value for value in graph.inputs if value.name == "position_ids"]
    batch, count = (
        ir.node("Shape", [positions], {"start": axis, "end": axis + 1}) for axis in (0, 1)
    )
    few = ir.node("Mul", [batch.outputs[0], constant(graph, "few", [FEW_NODES])])
    many = ir.node("Less", [few.outputs[0], count.outputs[0]])
    return [batch, count, few, many], many.outputs[0]


def _producer(value: ir.Value | None) -> ir.Node:
    node = value.producer() if value is not None else None
    assert node is not None
    return node
