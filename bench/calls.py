"""What single calls cost: the draft step, verify by node count, and our code around the raw session's call."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from eesd.runtime.engine import Binding, Outputs
from eesd.runtime.ort_engine import OrtBinding
from eesd.runtime.tree import TokenTree

LEVELS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Depths of the synthetic rounds of a sweep."""
SWEEPS = 3
"""Times that each is run."""
STEPS = 6
"""Draft steps that are told apart, each cheaper than the one before it: the weights come back into the caches."""
PLAIN = 12
"""Passes over one node in a row, as plain decoding makes them; the first half only drives the draft's traces out."""


class RoundCosts(NamedTuple):
    """Seconds of a round's draft steps (the last stands for all behind it), and of verify by node count; one node is plain
    decoding's."""

    draft: list[float]
    verify: list[list[float]]


def timed(call: Callable[[], Outputs]) -> float:
    """Seconds of a call. What it leaves on a device, such as logits that nobody asks for, is not fetched; nor is it in use."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def sweep(draft: Binding, verify: Binding, slot: int, width: int, most_nodes: int, tokens: Sequence[int]) -> RoundCosts:
    """Rounds of every depth at ``slot``, as a session runs them: draft step by draft step, then one verify pass.

    In use draft and verify alternate, and each finds its weights evicted by the other; so do they here. ``tokens`` (at least as
    many as nodes) are drafted. Plain decoding, one node after a pass of one node, comes first.
    """
    steps: dict[int, list[float]] = {}
    costs: dict[int, list[float]] = {}
    for _ in range(SWEEPS):
        plain = [timed(lambda: verify.forward(tokens[:1], [slot], slot)) for _ in range(PLAIN)]
        costs.setdefault(1, []).extend(plain[PLAIN // 2 :])
        for levels in LEVELS:
            if 1 + levels * width > most_nodes:
                break
            tree, frontier = TokenTree(tokens[0]), [0]
            for level in range(levels):
                seconds = timed(_drafting(draft, tree, frontier, slot))
                steps.setdefault(min(level, STEPS - 1), []).append(seconds)
                frontier = [tree.add(tokens[len(tree)], frontier[i % len(frontier)], 0.0) for i in range(width)]
            costs.setdefault(len(tree), []).append(timed(_verifying(verify, tree, slot)))
    verifying = [[nodes, statistics.median(seconds)] for nodes, seconds in costs.items()]
    return RoundCosts([statistics.median(seconds) for seconds in steps.values()], verifying)


def _drafting(draft: Binding, tree: TokenTree, frontier: list[int], slot: int) -> Callable[[], Outputs]:
    tokens, begin = [tree.tokens[node] for node in frontier], slot + frontier[0]
    if tree.is_chain:
        return lambda: draft.forward(tokens, [begin], begin)
    positions = [slot + tree.depths[node] for node in frontier]
    return lambda: draft.forward(tokens, positions, begin, slot, tree.visible(frontier[0]))


def _verifying(verify: Binding, tree: TokenTree, slot: int) -> Callable[[], Outputs]:
    if tree.is_chain:
        return lambda: verify.forward(tree.tokens, range(slot, slot + len(tree)), slot)
    positions = [slot + depth for depth in tree.depths]
    return lambda: verify.forward(tree.tokens, positions, slot, slot, tree.visible())


def call_overhead(draft: Binding, slot: int, repeats: int = 200) -> float | None:
    """Median seconds that our code adds to a draft step over the raw session's call; None where a backend has no such call."""
    if not isinstance(draft, OrtBinding):
        return None
    draft.forward([1], [slot], slot)
    calls: dict[str, Callable[[], Any]] = {
        "own": lambda: draft.forward([1], [slot], slot),
        "raw": lambda: draft.run_again(1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return statistics.median(a - b for a, b in zip(seconds["own"], seconds["raw"], strict=True))
