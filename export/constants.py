"""Constants of a graph: shapes and sizes, as opposed to weights."""

import onnx_ir as ir


def constant(graph: ir.Graph, kind: str, values: list[int]) -> ir.Value:
    """A vector of int64. Nodes with the same values share it."""
    name = f"{kind}_" + "_".join(map(str, values)).replace("-", "m")
    found = graph.initializers.get(name)
    if found is None:
        found = ir.val(name, const_value=ir.tensor(values, dtype=ir.DataType.INT64, name=name))
        found.meta["constant"] = True
        graph.initializers[name] = found
    return found


def is_constant(value: ir.Value) -> bool:
    return bool(value.meta.get("constant"))


def values_of(value: ir.Value | None) -> list[int]:
    """The values of a constant."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    assert tensor is not None
    return [int(number) for number in tensor.numpy().reshape(-1)]
