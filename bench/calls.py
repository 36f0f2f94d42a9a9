"""What single calls cost: the draft step, verify by node count, and our code around the raw session's call."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from eesd.runtime.engine import Binding, Outputs
from eesd.runtime.ort_engine import OrtBinding
from eesd.runtime.tree import TokenTree

LEVELS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Depths of the synthetic rounds of a sweep."""
OFTEN, SELDOM = 4, 1
"""Rounds of each depth up to 8, and of deeper ones: about the mixture that is met in use."""
PLAIN = 6
"""Passes over one node in a row, as plain decoding makes them; the first half only drives out what drafting left behind."""


class Swept(NamedTuple):
    """Seconds of a round's drafts by steps, and of its verify pass by node count; one node is plain decoding's."""

    draft: list[list[float]]
    verify: list[list[float]]


def timed(call: Callable[[], Outputs]) -> float:
    """Seconds of a call. What it leaves on a device, such as logits that nobody asks for, is not fetched; nor is it in use."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def sweep(draft: Binding, verify: Binding, slot: int, width: int, most_nodes: int, tokens: Sequence[int]) -> Swept:
    """Rounds of every depth at ``slot``, as a session runs them: draft step by draft step, then one verify pass.

    In use draft and verify alternate, rounds are long and short, and what a call finds in the caches depends on those before
    it; so do they here, in a random order that is always the same. ``tokens`` (at least as many as nodes) are drafted.
    """
    depths = [depth for depth in (0, *LEVELS) if 1 + depth * width <= most_nodes]
    order = [depth for depth in depths for _ in range(OFTEN if depth <= 8 else SELDOM)]
    random.Random(0).shuffle(order)
    drafting: dict[int, list[float]] = {depth: [] for depth in depths}
    verifying: dict[int, list[float]] = {depth: [] for depth in depths}
    for depth in order:
        if depth:
            draft_seconds, verify_seconds = _round(draft, verify, slot, width, depth, tokens)
            drafting[depth].append(draft_seconds)
            verifying[depth].append(verify_seconds)
        else:
            passes = [timed(lambda: verify.forward(tokens[:1], [slot], slot)) for _ in range(PLAIN)]
            verifying[0] += passes[PLAIN // 2 :]
    return Swept(
        [[depth, statistics.median(drafting[depth])] for depth in depths if depth],
        [[1 + depth * width, statistics.median(verifying[depth])] for depth in depths],
    )


def _round(draft: Binding, verify: Binding, slot: int, width: int, levels: int, tokens: Sequence[int]) -> tuple[float, float]:
    """Seconds of all draft steps, and of the verify pass."""
    tree, frontier, seconds = TokenTree(tokens[0]), [0], 0.0
    for _ in range(levels):
        seconds += timed(_drafting(draft, tree, frontier, slot))
        frontier = [tree.add(tokens[len(tree)], frontier[i % len(frontier)], 0.0) for i in range(width)]
    return seconds, timed(_verifying(verify, tree, slot))


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
