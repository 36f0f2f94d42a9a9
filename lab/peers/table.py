"""The comparison as Markdown, from the JSON file alone."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable

from eesd.bench.measure.results import shown_machine
from eesd.bench.measure.stats import Interval, bootstrap
from eesd.common.markdown import table
from lab.peers.contestants import F32, Contestant, anchors, grouped
from lab.peers.results import Result, Run

Value = Callable[[Run], float]


def markdown(result: Result, level: str = "#") -> list[str]:
    """Lines: a table for each group, and what is needed to read it. ``level`` begins the
    heading."""
    lines = [
        f"{level} EESD against other runtimes: {result.model['name']}",
        "",
        *_conditions(result),
    ]
    for group, everybody in grouped(result.contestants).items():
        if members := [c for c in everybody if any(r.contestant == c.name for r in result.runs)]:
            lines += [f"{level}# {group}", "", *_table(result, members)]
    lines += _quality(result, f"{level}# Quality")
    if result.skipped:
        lines += [
            f"{level}# Left out",
            "",
            *(f"* {name}: {reason}" for name, reason in result.skipped.items()),
            "",
        ]
    return lines


def _conditions(result: Result) -> list[str]:
    options = result.options
    counts = Counter(len(prompt.tokens) for prompt in result.prompts)
    prompts = (
        " and ".join(f"{count} of {length} tokens" for length, count in counts.items()) or "none"
    )
    settings = {
        "machine": shown_machine(result.machine),
        "versions": ", ".join(result.packages.values()),
        "threads": f"{options['threads']}"
        + (", by their processor time" if any(load.threads for load in result.loads) else ""),
        "prompts": prompts,
        "texts": f"{options['new_tokens']} new tokens, greedy, batch 1, past any EOS",
        "processes": f"{options['processes']} of each contestant",
    }
    lines = [
        *table(["setting", ""], settings.items()),
        "Contestants decode the same token ids one after another, in an order that rotates. "
        "Figures are medians over processes "
        "and prompts, with a 95 % bootstrap interval.",
        "",
        "A ratio is EESD's plain figure over the contestant's, on the same prompt. EESD is "
        "faster above 1 for tokens/s, and "
        "below 1 for the time to the first token (TTFT). Peak: the largest resident size. "
        "Anonymous: memory of no file. Same "
        "tokens: the median common prefix with plain decoding.",
        "",
    ]
    return lines if result.complete else [*lines, "**Incomplete**; see Left out.", ""]


def _table(result: Result, members: list[Contestant]) -> list[str]:
    anchor = anchors(result.contestants).get(members[0].group)
    length = {prompt.kind: len(prompt.tokens) for prompt in result.prompts}
    columns = [
        words for tokens in length.values() for words in (f"tokens/s after {tokens}", "ratio")
    ]
    columns += [words for tokens in length.values() for words in (f"TTFT of {tokens}, ms", "ratio")]
    columns = ["", *columns, "load, s", "peak, MB", "anonymous, MB", "on disk, MB", "same tokens"]
    return table(columns, (_row(result, one, anchor, [*length]) for one in members))


def _row(
    result: Result, contestant: Contestant, anchor: Contestant | None, kinds: list[str]
) -> list[str]:
    cells = [contestant.name]
    values: tuple[tuple[Value, float], ...] = (
        (lambda r: r.rate, 1),
        (lambda r: r.first_seconds, 1e3),
    )
    for value, scale in values:
        for kind in kinds:
            own, ratio = _compare(result, contestant, anchor, kind, value)
            cells += [
                own.shown(".0f", scale, bold=False) if own else "",
                ratio.shown() if ratio else "",
            ]
    loads = [load for load in result.loads if load.contestant == contestant.name]
    cells.append(f"{statistics.median(load.seconds for load in loads):.2f}" if loads else "")
    cells.append(_megabytes(load.peak_bytes for load in loads))
    cells.append(_megabytes(load.anonymous_bytes for load in loads))
    cells.append(_megabytes([result.sizes.get(f"{contestant.peer} {contestant.variant}")]))
    return [*cells, same_tokens(result, contestant)]


def _compare(
    result: Result, contestant: Contestant, anchor: Contestant | None, kind: str, value: Value
) -> tuple[Interval | None, Interval | None]:
    """Median of the contestant with its interval, and the ratio of the anchor's to it."""
    of_kind = {p.id for p in result.prompts if p.kind == kind}
    own = {
        key: value(run) for key, run in _runs(result, contestant).items() if run.prompt in of_kind
    }
    if not own:
        return None, None
    others = _runs(result, anchor) if anchor and anchor != contestant else {}
    ratios = [value(others[key]) / own[key] for key in own if key in others]
    return bootstrap([*own.values()]), bootstrap(ratios) if ratios else None


def same_tokens(result: Result, contestant: Contestant) -> str:
    """Median common prefix with the tokens that should be the same; empty if there are none."""
    if contestant.is_plain:
        anchor = anchors(result.contestants).get(F32) if contestant.group == F32 else None
    else:
        weights = (contestant.peer, contestant.variant, "plain")
        anchor = next(
            (c for c in result.contestants if (c.peer, c.variant, c.mode) == weights), None
        )
    if anchor is None or anchor == contestant:
        return ""
    wanted = _runs(result, anchor)
    found = _runs(result, contestant)
    pairs = [(found[key].tokens, wanted[key].tokens) for key in found if key in wanted]
    return (
        f"{statistics.median(_common(*pair) for pair in pairs):.0f} of {len(pairs[0][1])}"
        if pairs
        else ""
    )


def _common(first: list[int], second: list[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def _quality(result: Result, heading: str) -> list[str]:
    if not result.qualities:
        return []
    known = {c.name: c for c in result.contestants}
    rows = []
    for quality in result.qualities:
        contestant = known[quality.contestant]
        size = _megabytes([result.sizes.get(f"{contestant.peer} {contestant.variant}")])
        rows.append(
            [quality.contestant, f"{quality.divergence:.4f}", f"{quality.agreement:.1%}", size]
        )
    return [
        heading,
        "",
        f"Next-token distributions on {result.qualities[0].positions} tokens of held-out "
        "text, in windows of "
        f"{result.options['window']}, against {result.quality_reference}. KL is the mean of "
        "KL(float32 || contestant) in nats. "
        "Speculative modes have the distributions of plain decoding.",
        "",
        *table(["", "KL", "same top token", "on disk, MB"], rows),
    ]


def _runs(result: Result, contestant: Contestant) -> dict[tuple[int, str], Run]:
    """By process and prompt."""
    return {
        (run.process, run.prompt): run for run in result.runs if run.contestant == contestant.name
    }


def _megabytes(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known) / 1e6:.0f}" if known else ""
