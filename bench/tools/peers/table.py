"""The comparison as Markdown, from the JSON file alone."""

import statistics
from collections.abc import Callable, Iterable

from eesd.bench.measure.results import shown_machine
from eesd.bench.measure.stats import Interval, bootstrap
from eesd.bench.tools.peers.contestants import F32, Contestant, anchors, grouped
from eesd.bench.tools.peers.results import KINDS, Result, Run

Value = Callable[[Run], float]


def markdown(result: Result, level: str = "#") -> list[str]:
    """Lines: a table for each group, and what is needed to read it. ``level`` begins the heading."""
    lines = [f"{level} EESD against other runtimes: {result.model['name']}", "", *_conditions(result)]
    for group, everybody in grouped(result.contestants).items():
        if members := [c for c in everybody if any(r.contestant == c.name for r in result.runs)]:
            lines += [f"{level}# {group}", "", *_table(result, members), ""]
    lines += _quality(result, f"{level}# Quality")
    if result.skipped:
        lines += [f"{level}# Left out", "", *(f"* {name}: {reason}" for name, reason in result.skipped.items()), ""]
    return lines


def _conditions(result: Result) -> list[str]:
    options = result.options
    lengths = {kind: len(p.tokens) for p in result.prompts for kind in KINDS if p.kind == kind}
    counts = {kind: sum(p.kind == kind for p in result.prompts) for kind in KINDS}
    prompts = " and ".join(f"{counts[kind]} of {length} tokens" for kind, length in lengths.items()) or "none"
    counted = ", counted by their processor time" if any(load.threads for load in result.loads) else ""
    packages = ", ".join(result.packages.values())
    lines = [
        f"{shown_machine(result.machine)}. {packages}.",
        "",
        f"{options['threads']} threads{counted}, batch 1, greedy, {options['new_tokens']} new tokens, past any EOS. "
        f"Prompts: {prompts}; the same token ids for everybody. {options['processes']} processes of each contestant; those of "
        "a group decode each prompt one after another, in an order that rotates, while the others wait.",
        "",
        "Figures are medians over processes and prompts, with the 95 % bootstrap interval of the median. A ratio is EESD's "
        "plain figure over the contestant's, in the same process and on the same prompt. For tokens/s EESD is faster above 1, "
        "for the time to the first token (TTFT) below 1. Peak is the largest resident size; anonymous is what is not of "
        "files, after the last prompt. Same tokens: the median common prefix with plain decoding, of EESD in float32 or of the "
        "same weights.",
        "",
    ]
    return lines if result.complete else [*lines, "**Incomplete**; see Left out.", ""]


def _table(result: Result, members: list[Contestant]) -> list[str]:
    anchor = anchors(result.contestants).get(members[0].group)
    kinds = [kind for kind in KINDS if any(p.kind == kind for p in result.prompts)]
    length = {p.kind: len(p.tokens) for p in result.prompts}
    columns = [f"tokens/s behind {length[k]} | ratio" for k in kinds] + [f"TTFT of {length[k]}, ms | ratio" for k in kinds]
    header = f"| | {' | '.join(columns)} | load, s | peak, MB | anonymous, MB | on disk, MB | same tokens |"
    return [header, "|---" * (header.count("|") - 1) + "|", *(_row(result, c, anchor, kinds) for c in members)]


def _row(result: Result, contestant: Contestant, anchor: Contestant | None, kinds: list[str]) -> str:
    cells = []
    values: tuple[tuple[Value, float, str], ...] = ((lambda r: r.rate, 1, ".0f"), (lambda r: r.first_seconds, 1e3, ".0f"))
    for value, scale, style in values:
        for kind in kinds:
            own, ratio = _compare(result, contestant, anchor, kind, value)
            cells += [_interval(own, scale, style) if own else "", ratio]
    loads = [load for load in result.loads if load.contestant == contestant.name]
    cells.append(f"{statistics.median(load.seconds for load in loads):.2f}" if loads else "")
    cells.append(_megabytes(load.peak_bytes for load in loads))
    cells.append(_megabytes(load.anonymous_bytes for load in loads))
    cells.append(_megabytes([result.sizes.get(f"{contestant.peer} {contestant.variant}")]))
    return f"| {contestant.name} | {' | '.join([*cells, same_tokens(result, contestant)])} |"


def _compare(
    result: Result, contestant: Contestant, anchor: Contestant | None, kind: str, value: Value
) -> tuple[Interval | None, str]:
    """Median of the contestant with its interval, and the ratio of the anchor's to it."""
    of_kind = {p.id for p in result.prompts if p.kind == kind}
    own = {(r.process, r.prompt): value(r) for r in _runs(result, contestant) if r.prompt in of_kind}
    if not own:
        return None, ""
    median = bootstrap([*own.values()])
    if anchor is None or anchor == contestant:
        return median, ""
    others = {(r.process, r.prompt): value(r) for r in _runs(result, anchor)}
    ratios = [others[key] / own[key] for key in own if key in others]
    if not ratios:
        return median, ""
    return median, _interval(bootstrap(ratios), 1, ".2f", "**")


def _interval(found: Interval, scale: float, style: str, bold: str = "") -> str:
    low, high = (f"{value * scale:{style}}" for value in (found.low, found.high))
    return f"{bold}{found.median * scale:{style}}{bold} ({low} to {high})"


def same_tokens(result: Result, contestant: Contestant) -> str:
    """Median common prefix with the tokens that should be the same; empty if there are none."""
    if contestant.is_plain:
        anchor = anchors(result.contestants).get(F32) if contestant.group == F32 else None
    else:
        weights = (contestant.peer, contestant.variant, "plain")
        anchor = next((c for c in result.contestants if (c.peer, c.variant, c.mode) == weights), None)
    if anchor is None or anchor == contestant:
        return ""
    wanted = {(r.process, r.prompt): r.tokens for r in _runs(result, anchor)}
    pairs = [
        (run.tokens, wanted[run.process, run.prompt])
        for run in _runs(result, contestant)
        if (run.process, run.prompt) in wanted
    ]
    if not pairs:
        return ""
    return f"{statistics.median(_common(*pair) for pair in pairs):.0f} of {len(pairs[0][1])}"


def _common(first: list[int], second: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


def _quality(result: Result, heading: str) -> list[str]:
    if not result.qualities:
        return []
    positions = result.qualities[0].positions
    lines = [
        heading,
        "",
        f"Next-token distributions on {positions} tokens of held-out text, in windows of {result.options['window']} tokens, "
        f"against {result.quality_reference}: mean KL(float32 || contestant) in nats, and how often the most likely token is "
        "the same. Speculative modes have the distributions of plain decoding.",
        "",
        "| | KL | same top token | on disk, MB |",
        "|---|---|---|---|",
    ]
    known = {c.name: c for c in result.contestants}
    for quality in result.qualities:
        contestant = known[quality.contestant]
        size = _megabytes([result.sizes.get(f"{contestant.peer} {contestant.variant}")])
        lines.append(f"| {quality.contestant} | {quality.divergence:.4f} | {quality.agreement:.1%} | {size} |")
    return [*lines, ""]


def _runs(result: Result, contestant: Contestant) -> list[Run]:
    return [run for run in result.runs if run.contestant == contestant.name]


def _megabytes(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known) / 1e6:.0f}" if known else ""
