"""Writes the comparison as Markdown. Everything comes from the JSON file."""

import statistics
from collections.abc import Callable, Iterable, Sequence

from eesd.bench.measure.results import shown_machine
from eesd.bench.measure.stats import bootstrap
from eesd.common.markdown import table
from lab.peers.contestants import EESD, Contestant
from lab.peers.results import Prompt, Result, Run
from lab.peers.texts import PROMPT_TOKENS

Rate = Callable[[Run], float]


def markdown(result: Result, level: str = "#") -> list[str]:
    """Return the lines of the report. They have tables of speed, ratios, memory and quality, and
    the settings. ``level`` is the mark of its heading."""
    members = [c for c in result.contestants if any(r.contestant == c.name for r in result.runs)]
    lines = [
        f"{level} EESD against other runtimes: {result.model['name']}",
        "",
        *_conditions(result),
    ]
    if members:
        lines += [
            (
                "The table shows tokens per second: of prefill in columns with the length of "
                "a prompt, and of generated text in the other columns."
            ),
            "",
            *_speeds(result, members),
            "Speed of EESD divided by the speed of another contestant:",
            "",
            *_ratios(result, members),
            *_costs(result, members),
        ]
    lines += _quality(result, f"{level}# Quality")
    if result.skipped:
        lines += [
            f"{level}# Skipped",
            "",
            *(f"* {name}: {reason}" for name, reason in result.skipped.items()),
            "",
        ]
    return lines


def _conditions(result: Result) -> list[str]:
    options = result.options
    counted = " (checked by processor time)" if any(load.threads for load in result.loads) else ""
    settings = {
        "machine": shown_machine(result.machine),
        "versions": ", ".join(result.packages.values()),
        "threads": f"{options['threads']}{counted}",
        "texts": (
            f"{max([p.count for p in result.prompts], default=0)} new tokens, batch size "
            "1, EOS ignored"
        ),
        "processes": f"{options['processes']} per contestant",
    }
    lines = [
        *table(["setting", ""], settings.items()),
        (
            "Contestants take turns and decode the same token ids. Values are medians "
            "over prompts and processes, with 95 % bootstrap intervals. Ratios are "
            "paired by prompt."
        ),
        "",
    ]
    return lines if result.complete else [*lines, "**Incomplete**; see Skipped.", ""]


def _kinds(result: Result) -> dict[str, list[Prompt]]:
    """Return the prompts of each column of the table. Each kind has a column. If several kinds have
    greedy texts, one more column has all these texts."""
    found: dict[str, list[Prompt]] = {}
    for prompt in result.prompts:
        found.setdefault(prompt.kind, []).append(prompt)
    texts = [p for p in result.prompts if p.count != PROMPT_TOKENS and not p.temperature]
    if len({prompt.kind for prompt in texts}) > 1:
        found["all, greedy"] = texts
    return found


def rates(result: Result, contestant: Contestant, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Return the tokens per second for each process and prompt. They are those of the new tokens
    or, for a long prompt, of the prompt itself."""
    by = {prompt.id: prompt for prompt in prompts}
    found = {}
    for run in result.runs:
        if run.contestant == contestant.name and run.prompt in by:
            prompt = by[run.prompt]
            whole = len(prompt.tokens) / run.first_seconds
            found[f"{run.process} {run.prompt}"] = (
                whole if prompt.count == PROMPT_TOKENS else run.rate
            )
    return found


def _speeds(result: Result, members: Sequence[Contestant]) -> list[str]:
    rows = []
    for one in members:
        cells = [one.name]
        for prompts in _kinds(result).values():
            found = rates(result, one, prompts)
            cells.append(bootstrap([*found.values()]).shown(".1f", bold=False) if found else "")
        rows.append(cells)
    return table(["", *_kinds(result)], rows)


def _ratios(result: Result, members: Sequence[Contestant]) -> list[str]:
    rows = []
    for own in (one for one in members if one.peer == EESD):
        for other in members:
            if other == own or (own.is_plain and not other.is_plain):
                continue
            cells = [f"{own.name} / {other.name}"]
            for prompts in _kinds(result).values():
                above = rates(result, own, prompts)
                below = rates(result, other, prompts)
                pairs = [above[key] / below[key] for key in above if key in below]
                cells.append(bootstrap(pairs).shown() if pairs else "")
            rows.append(cells)
    return table(["", *_kinds(result)], rows) if rows else []


def _costs(result: Result, members: Sequence[Contestant]) -> list[str]:
    rows = []
    for one in members:
        loads = [load for load in result.loads if load.contestant == one.name]
        rows.append(
            [
                one.name,
                f"{statistics.median(load.seconds for load in loads):.2f}",
                _megabytes(load.peak_bytes for load in loads),
                _megabytes(load.anonymous_bytes for load in loads),
                _megabytes([result.sizes.get(f"{one.peer} {one.variant}")]),
                same_tokens(result, one),
            ]
        )
    lines = table(
        ["", "load (s)", "peak (MB)", "anonymous (MB)", "on disk (MB)", "same tokens"], rows
    )
    return [
        *lines,
        (
            "`peak` is the largest resident size, and `anonymous` the memory that is not "
            "mapped from files. `same tokens` is the median number of first tokens that "
            "are equal to plain greedy decoding by the same runtime."
        ),
        "",
    ]


def same_tokens(result: Result, contestant: Contestant) -> str:
    """Return the median length of the common prefix with plain greedy decoding. It is empty for
    plain decoding itself."""
    plain = next(
        (c for c in result.contestants if c.peer == contestant.peer and c.is_plain), contestant
    )
    greedy = [prompt for prompt in result.prompts if not prompt.temperature]
    pairs = []
    for prompt in greedy if plain != contestant else []:
        runs = {
            (run.contestant, run.process): run.tokens
            for run in result.runs
            if run.prompt == prompt.id
        }
        pairs += [
            (tokens, runs[plain.name, process])
            for (name, process), tokens in runs.items()
            if name == contestant.name and (plain.name, process) in runs
        ]
    if not pairs:
        return ""
    median = statistics.median(common(*pair) for pair in pairs)
    return f"{median:.0f} of {max(len(tokens) for tokens, _ in pairs)}"


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(first, second, strict=False)
    different = (index for index, (one, other) in enumerate(pairs) if one != other)
    return next(different, min(len(first), len(second)))


def _quality(result: Result, heading: str) -> list[str]:
    if not result.qualities:
        return []
    rows = [
        [one.contestant, f"{one.divergence:.5f}", f"{one.agreement:.1%}"]
        for one in result.qualities
    ]
    return [
        heading,
        "",
        (
            f"Next-token distributions are compared on {result.qualities[0].positions} "
            f"tokens of held-out text, in windows of {result.options['window']} tokens. "
            "`KL` is the mean of KL(float32 || contestant) in nats, where float32 "
            "computes with the values of the file in float32. Drafts do not change the "
            "distributions."
        ),
        "",
        *table(["", "KL", "same top token"], rows),
    ]


def _megabytes(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known) / 1e6:.0f}" if known else ""
