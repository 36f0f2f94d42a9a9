"""Statistics and comparisons for the terminal."""

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from eesd.runtime.compare import Comparison
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.llm import LLM


def show_stats(stats: Stats, llm: LLM) -> None:
    """A small table on stderr."""
    table = Table(show_header=False)
    for name, value in _rows(stats, llm):
        table.add_row(name, value)
    Console(stderr=True).print(table)


def _rows(stats: Stats, llm: LLM) -> list[tuple[str, str]]:
    rows = [
        ("prompt", f"{stats.prompt_tokens} tokens in {stats.prefill_seconds * 1e3:.0f} ms"),
        (
            "generated",
            f"{stats.new_tokens} tokens in {stats.decode_seconds:.2f} s, {stats.tokens_per_second:.1f} tokens/s",
        ),
    ]
    if stats.drafting_rounds:
        by_depth = [f"{a / o:.2f}" for a, o in zip(stats.accepted_at_depth, stats.offered_at_depth, strict=True) if o]
        rows += [
            ("rounds", f"{stats.rounds}, {stats.tokens_per_round:.2f} tokens each"),
            ("drafted", f"{stats.drafted}, accepted {stats.accepted}"),
            ("acceptance", f"{stats.acceptance:.2f}, by depth {' '.join(by_depth[:8])}"),
            ("time", _shares(stats)),
        ]
    if stats.guard_rests:
        rows.append(("guard", f"drafting rested {stats.guard_rests} times: it was slower than plain decoding"))
    if llm.speculation is not None and not llm.manifest.exit_head.trained:
        rows.append(("exit head", "untrained: acceptance is low until it is trained with eesd-distill"))
    return rows


def _shares(stats: Stats) -> str:
    total = stats.decode_seconds or 1.0
    parts = (("draft", stats.draft_seconds), ("verify", stats.verify_seconds), ("host", stats.host_seconds))
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts)


def show_comparison(comparison: Comparison, as_json: bool) -> None:
    """Text, speeds, speed-up, and whether the tokens are equal; as one JSON object when asked for."""
    divergence = comparison.divergence
    if as_json:
        result = {
            "speedup": comparison.speedup,
            "equal": divergence is None,
            "divergence": asdict(divergence) if divergence else None,
            "plain": comparison.plain.to_dict(),
            "drafting": comparison.drafting.to_dict(),
        }
        click.echo(json.dumps(result))
        return
    click.echo(comparison.text)
    table = Table("", "tokens/s", "tokens a round", "acceptance")
    for name, stats in (("plain", comparison.plain), ("drafting", comparison.drafting)):
        acceptance = f"{stats.acceptance:.2f}" if stats.drafting_rounds else ""
        table.add_row(name, f"{stats.tokens_per_second:.1f}", f"{stats.tokens_per_round:.2f}", acceptance)
    table.add_row("speed-up", f"{comparison.speedup:.2f}x", "", "")
    Console(stderr=True).print(table)
    if divergence is None:
        click.echo(f"tokens are equal ({comparison.plain.new_tokens})", err=True)
    else:
        click.echo(
            f"tokens differ from new token {divergence.index} on ({divergence.plain_token} without drafting, "
            f"{divergence.drafted_token} with), logit gap {divergence.logit_gap:.2e}",
            err=True,
        )
