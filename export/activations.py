"""Write the activations of an MLP without a gate as nodes of standard ONNX."""

from collections.abc import Callable, Sequence

from eesd.common.architecture import CLAMP, CLAMPED_SLOPE, XIELU_LIMIT, XIELU_SLOPE

Node = Callable[..., str]
"""Adds a node, given its kind, inputs and attributes. Returns its output."""
Number = Callable[[float], str]
"""Adds a float32 constant."""


def activated(node: Node, x: str, kind: str) -> str:
    """An activation of x that has no parameters."""
    if kind == "relu2":
        positive = node("Relu", [x])
        return node("Mul", [positive, positive])
    return node("Gelu", [x], approximate="tanh")


def clamped(node: Node, number: Number, gate: str, up: str) -> str:
    """The gated activation of gpt-oss. It is computed from gate and up in float32."""
    gate = node("Min", [gate, number(CLAMP)])
    up = node("Clip", [up, number(-CLAMP), number(CLAMP)])
    slope = node("Sigmoid", [node("Mul", [gate, number(CLAMPED_SLOPE)])])
    return node("Mul", [node("Mul", [gate, slope]), node("Add", [up, number(1.0)])])


def xielu(node: Node, number: Number, x: str, factors: Sequence[str]) -> str:
    """Compute xielu (arXiv 2411.13010) of float32 x. It is a x^2 + x / 2 above 0, and b (exp(x) - 1
    - x) + x / 2 below, where a and b are the ``factors``."""
    above = node("Mul", [node("Mul", [x, x]), factors[0]])
    below = node("Exp", [node("Min", [x, number(XIELU_LIMIT)])])
    below = node("Sub", [node("Sub", [below, number(1.0)]), x])
    below = node("Mul", [below, factors[1]])
    curved = node("Where", [node("Greater", [x, number(0.0)]), above, below])
    return node("Add", [curved, node("Mul", [x, number(XIELU_SLOPE)])])
