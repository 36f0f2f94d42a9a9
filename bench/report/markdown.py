"""Results as Markdown. Everything comes from the JSON files, so a report can be generated again."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from eesd.bench.measure.results import Configuration, Result, shown_machine
from eesd.bench.replay.costs import mean_call_costs
from eesd.bench.replay.simulation import Simulation
from eesd.bench.report.replays import replay_section
from eesd.bench.report.stats import Summary, best_fixed_lengths, summarize
from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.markdown import table
from eesd.common.outputs import check_own

TITLE = "# Results"
DEEPEST = 8
"""Last depth of the acceptance tables."""


def write_report(
    results: Sequence[Result],
    simulations: Sequence[Simulation],
    output: Path,
    first: Sequence[str] = (),
) -> None:
    """Write a report.

    Args:
        results: Measurements.
        simulations: The replays. Their sections come last.
        output: Markdown file.
        first: Lines of sections that come first.

    Raises:
        EESDError: A result has no runs, or another program wrote ``output``.
    """
    lines = [
        TITLE,
        "",
        (
            "This page is generated from the JSON files of `eesd-bench` and its tools. "
            "Do not edit it. Similar tables are explained once, before the first of them."
        ),
        "",
        *first,
    ]
    for result in results:
        if not result.runs:
            raise EESDError("A result has no runs yet; resume the measurement.")
        lines += _Section(result).lines()
    for simulation in simulations:
        lines += replay_section(simulation)
    output.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(output) as temporary:
        temporary.write_text("\n".join(_once(lines)).rstrip() + "\n", "utf-8")
        check_own(output, TITLE)


def _once(lines: Sequence[str]) -> list[str]:
    """Return the lines without repeated paragraphs. The empty line after each repeated paragraph is
    left out as well."""
    seen: set[str] = set()
    found: list[str] = []
    skipped = False
    for line in lines:
        prose = bool(line) and line[0] not in "#|*!"
        if not (prose and line in seen) and not (skipped and not line):
            found.append(line)
        skipped = prose and line in seen
        if prose:
            seen.add(line)
    return found


class _Section:
    """Return the section of one result. With several engines, only the best fixed lengths are
    shown."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.several = len(result.engines) > 1
        self.best = best_fixed_lengths(result)
        self.all = summarize(result)
        hidden = [
            s
            for s in self.all
            if self.several and _length(s.configuration) and not self._is_best(s.configuration)
        ]
        self.summaries = [s for s in self.all if s not in hidden]

    def lines(self) -> list[str]:
        engine = next(iter(self.result.engines.values()))
        found = [
            (
                f"## {'What each part contributes' if self.several else 'Speed'}: "
                f"{engine['model']}, {engine['dtype']}"
            ),
            "",
            *self._setting(),
        ]
        for sampling, group in groupby(self.summaries, lambda s: s.configuration.sampling):
            members = list(group)
            found += [f"### {sampling}", "", *self._speeds(members), _equality(members), ""]
        return [*found, *self._by_task(), *self._acceptance(), *self._tuned(), *self._call_costs()]

    def _setting(self) -> list[str]:
        """Describe the model, the machine and the measurement."""
        result, options, machine = self.result, self.result.options, self.result.machine
        engine = next(iter(result.engines.values()))
        measured = len({run.prompt for run in result.runs})
        tasks = ", ".join(dict.fromkeys(prompt["task"] for prompt in result.prompts))
        lines = [
            *table(
                ["setting", ""],
                {
                    "model": f"{engine['architecture']} of {engine['num_layers']} layers, "
                    f"exit after layer {engine['exit_layer']}",
                    "backend": f"`{options['backend']}`, {engine['dtype']}, "
                    f"{'with' if options['guard'] else 'without'} the "
                    "guard",
                    "machine": f"{shown_machine(machine)}; GPU: {machine['GPU']}",
                    "versions": machine["libraries"],
                    "prompts": f"{measured} ({tasks}), {options['max_new_tokens']} new tokens each",
                    "temperature": f"{options['temperature']}, except for greedy",
                }.items(),
            ),
            (
                "Each prompt is decoded plainly and in every configuration, in rotating "
                "order. docs/bench.md explains the columns."
            ),
            "",
        ]
        if self.several:
            lines += [
                ("Of the fixed lengths, only the best for each exit head (in hindsight) is shown."),
                "",
            ]
        if not result.complete:
            lines += [f"**Incomplete:** {measured} of {len(result.prompts)} prompts.", ""]
        return lines

    def _speeds(self, summaries: Sequence[Summary]) -> list[str]:
        columns: dict[str, Callable[[Summary], str]] = {
            "controller": self._controller,
            "draft": lambda s: _shape(s.configuration),
            "speed-up (95 %)": lambda s: s.speedup.shown(unit="x"),
            "against best fixed": lambda s: (
                s.against_fixed.shown(unit="x") if s.against_fixed else ""
            ),
            "in total": lambda s: f"{s.speedup_total:.2f}x",
            "predicted": lambda s: (
                f"{s.predicted:.2f}x ({s.predicted / s.speedup_total - 1:+.1%})"
                if s.predicted
                else ""
            ),
            "tokens/s": lambda s: f"{s.plain_tokens_per_second:.0f} to {s.tokens_per_second:.0f}",
            "acceptance": lambda s: f"{s.overall_acceptance:.2f}",
            "tokens per round": lambda s: f"{s.tokens_per_round:.2f}",
            "draft steps per round": lambda s: f"{s.steps_per_round:.2f}",
            "host": lambda s: f"{s.host_share:.1%}",
            "equal": lambda s: (
                "" if s.configuration.sampling == "rejection" else f"{s.equal}/{s.prompts}"
            ),
        }
        return table([*columns], [[cell(s) for cell in columns.values()] for s in summaries])

    def _by_task(self) -> list[str]:
        """Return a table of the median speed-up on each task. It has a row for each
        configuration."""
        tasks = list(dict.fromkeys(prompt["task"] for prompt in self.result.prompts))
        rows = []
        for s in self.summaries:
            values = [
                f"{s.by_task[task].median:.2f}" if task in s.by_task else "" for task in tasks
            ]
            rows.append(
                [s.configuration.sampling, _shape(s.configuration), self._controller(s), *values]
            )
        return ["### By task", "", *table(["sampling", "draft", "controller", *tasks], rows)]

    def _acceptance(self) -> list[str]:
        """Return a table of the acceptance at each depth. It is that of the longest fixed
        length."""
        judged: Mapping[str, Sequence[Sequence[int]]] = {
            f"{t.sampling}, {_width(t.width)}": t.acceptance[t.longest]
            for t in self.result.tunings
            if t.controller == "fixed"
        }
        where = "with the longest fixed length, on the tuning prompts"
        if self.several or not judged:
            fixed = [s for s in self.all if _length(s.configuration) and not s.configuration.budget]
            where = "with the longest fixed length"
            fixed.sort(key=lambda s: _length(s.configuration))
            judged = {
                self._named(c := s.configuration, f"{c.sampling}, {_width(c.width)}"): s.acceptance
                for s in fixed
            }
        if not judged:
            return []
        depth = min(max(map(len, judged.values())), DEEPEST)
        rows = []
        for label, counts in judged.items():
            shown = [f"{a / o:.2f}" if o else "" for a, o in counts[:depth]]
            rows.append([label, *shown, *[""] * (depth - len(shown))])
        return [
            "### Acceptance by depth",
            "",
            f"Share of the judged draft tokens that were accepted, {where}.",
            "",
            *table(["", *range(1, depth + 1)], rows),
        ]

    def _tuned(self) -> list[str]:
        """Return a table of the settings that were fastest on the tuning prompts."""
        rows = []
        for t in self.result.tunings:
            tried = ", ".join(spec.partition(":")[2].partition("=")[2] for spec in t.seconds)
            rows.append([t.sampling, _width(t.width), f"`{t.chosen}`", tried])
        if not rows:
            return []
        columns = ["sampling", "draft", "chosen", "candidates"]
        return ["### Tuned controllers", "", *table(columns, rows)]

    def _call_costs(self) -> list[str]:
        """Return a table of the costs of draft steps, verify passes and prefill. They are those of
        the last engine."""
        result, engine = self.result, [*self.result.engines][-1]
        rows = []
        for (of, width), costs in mean_call_costs(result.sweeps).items():
            if of == engine and (plain := costs.verify.get(1)):
                draft = ", ".join(
                    f"{steps}: {seconds / plain:.2f}" for steps, seconds in costs.draft.items()
                )
                verify = ", ".join(
                    f"{nodes}: {seconds / plain:.2f}"
                    for nodes, seconds in costs.verify.items()
                    if nodes > 1
                )
                rows.append([_width(width), f"{plain * 1e3:.2f} ms", draft, verify])
        if not rows:
            return []
        plainly = {
            result.index_of(c)
            for c in result.configurations
            if c.controller is None and c.engine == engine
        }
        tokens = {prompt["id"]: prompt["tokens"] for prompt in result.prompts}
        runs = [run for run in result.runs if run.configuration in plainly]
        speed = sum(tokens[r.prompt] - 1 for r in runs) / max(
            sum(r.prefill_seconds for r in runs), 1e-9
        )
        columns = [
            "draft",
            "plain step",
            "draft by steps, in plain steps",
            "verify by nodes, in plain steps",
        ]
        return [
            "### Cost of calls",
            "",
            *table(columns, rows),
            f"Prefill: {speed:.0f} tokens/s.",
            "",
        ]

    def _is_best(self, c: Configuration) -> bool:
        return self.best.get((c.engine, c.sampling, c.width)) == c.controller

    def _controller(self, s: Summary) -> str:
        c = s.configuration
        key = (c.engine, c.sampling, c.width, c.controller)
        tuned = any((t.engine, t.sampling, t.width, t.chosen) == key for t in self.result.tunings)
        return self._named(c, f"{c.controller}{' (tuned)' if tuned else ''}")

    def _named(self, c: Configuration, text: str) -> str:
        return f"{c.engine}, {text}" if self.several else text


def _equality(summaries: Sequence[Summary]) -> str:
    """Return a sentence that says how many drafting runs gave the tokens of plain decoding."""
    if summaries[0].configuration.sampling == "rejection":
        return (
            "Rejection sampling preserves the distribution of plain decoding, but not "
            "its tokens, so tokens are not compared."
        )
    runs = sum(s.prompts for s in summaries)
    equal = sum(s.equal for s in summaries)
    if runs == equal:
        return f"All {runs} drafting runs gave the tokens of plain decoding."
    gap = max(s.worst_gap or 0.0 for s in summaries)
    return (
        f"In {runs - equal} of {runs} drafting runs, tokens differed from plain "
        f"decoding. The largest logit gap is {gap:.3g}."
    )


def _length(configuration: Configuration) -> int:
    """Return the fixed length, or 0 for other controllers."""
    name, _, length = (configuration.controller or "").partition(":k=")
    return int(length) if name == "fixed" else 0


def _shape(configuration: Configuration) -> str:
    return f"{_width(configuration.width)}{', budget' if configuration.budget else ''}"


def _width(width: int) -> str:
    return "chain" if width == 1 else f"tree of {width}"
