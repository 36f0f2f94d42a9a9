"""What a round costs: a draft step, and a verify pass by node count, in units of one plain step.

A cost model is measured on an engine (``measure_costs``) or follows from layer counts (``layer_costs``), for devices that are
not here.
"""

import statistics
import time
from dataclasses import dataclass

from eesd.runtime.errors import EESDError
from eesd.runtime.llm import LLM

NODE_COUNTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class CostModel:
    """``draft`` is one draft step, ``verify`` (node count, cost) pairs that begin at one node; all in plain steps.

    Between two counts the cost is linear, behind the last it goes on as between the last two. ``plain_seconds`` says how
    long a plain step takes, to charge a controller its own time.
    """

    name: str
    draft: float
    verify: tuple[tuple[int, float], ...]
    plain_seconds: float

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.verify]
        if not counts or counts[0] != 1 or counts != sorted(set(counts)):
            raise EESDError(f"The verify costs of {self.name} must be given for ascending node counts from 1.")
        if min(self.draft, self.plain_seconds, *(cost for _, cost in self.verify)) <= 0:
            raise EESDError(f"A cost of {self.name} is not above 0.")

    def verify_cost(self, nodes: int) -> float:
        """A verify pass over ``nodes`` tokens, the root included."""
        points = self.verify
        if len(points) == 1:
            return points[0][1]
        right = next((i for i, (count, _) in enumerate(points) if count >= nodes and i), len(points) - 1)
        (n0, v0), (n1, v1) = points[right - 1], points[right]
        return v0 + (v1 - v0) * (nodes - n0) / (n1 - n0)

    def table(self, longest: int) -> list[float]:
        """Cost of a round that drafts 0, 1, ... ``longest`` tokens."""
        return [n * self.draft + self.verify_cost(n + 1) for n in range(longest + 1)]


def layer_costs(
    name: str, layers: int, exit_layer: int, plain_seconds: float, *, exit_blocks: int = 1, head: float = 1.0
) -> CostModel:
    """From layer counts: T(n) = n (N + e + h) + L + h, in layers; ``head`` is what the LM head costs, in layers.

    The verify pass costs the same for all node counts: at batch 1 a GPU is bound by reading the weights.
    """
    return CostModel(name, (exit_layer + exit_blocks + head) / (layers + head), ((1, 1.0),), plain_seconds)


BUNDLED = CostModel(
    "bundled, 2 CPU cores",
    0.17,
    tuple(zip(NODE_COUNTS, (1.0, 1.19, 1.25, 1.30, 1.35, 1.39, 1.54, 1.66, 1.84, 2.12, 2.47), strict=True)),
    3.1e-3,
)
"""The bundled model, float32, ONNX Runtime, measured on two cores."""

COST_MODELS = {
    "bundled": BUNDLED,
    "7b": layer_costs("7B, exit after 4 of 32 layers", 32, 4, 10e-3),
    "13b": layer_costs("13B, exit after 4 of 40 layers", 40, 4, 19e-3),
    "70b": layer_costs("70B, exit after 5 of 80 layers", 80, 5, 50e-3),
}
"""By name. The large ones are computed, not measured; their seconds are the weights in float16 at 1.5 TB/s (70B: at 3 TB/s)."""


def measure_costs(llm: LLM, name: str, slot: int = 200, repeats: int = 100) -> CostModel:
    """Medians of interleaved calls on an engine that was loaded with speculation."""
    assert llm._draft is not None
    slab = llm._verify.new_slab()
    slab.reserve(slot + max(NODE_COUNTS))
    draft, verify = llm._draft.bind(slab), llm._verify.bind(slab)
    counts = [count for count in NODE_COUNTS if count <= llm.manifest.max_tree_nodes + 1]
    samples: dict[int, list[float]] = {count: [] for count in (0, *counts)}
    for _ in range(repeats):
        draft.forward([1], [slot], slot)  # the first call behind another engine finds its weights evicted
        for count in samples:
            started = time.perf_counter()
            if count:
                verify.forward([1] * count, range(slot, slot + count), slot)
            else:
                draft.forward([1], [slot], slot)
            samples[count].append(time.perf_counter() - started)
    plain = statistics.median(samples[1])
    points = tuple((count, statistics.median(samples[count]) / plain) for count in counts)
    return CostModel(name, statistics.median(samples[0]) / plain, points, plain)
