"""Three levels over one cache, simulated: text or exit head draft for the whole model in fewer bits, which drafts for verify.

    python -m eesd.bench.tools.cascade trace.npy [--engines quantized/ head/ --prompts prompts.jsonl]

Decodes prompts greedily, records at every position how far the levels agree, and shows the best rounds of two and three levels.
In three, the quantized model judges what was drafted for it in a pass, adds a token, and drafts on for verify.
"""

from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from eesd.bench.measure.stats import bootstrap_ratio
from eesd.bench.replay.fresh_starts import read_prompts
from eesd.bench.replay.traces import ChainDrafter
from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.markdown import table_text
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.suffix import SuffixAutomaton
from eesd.runtime.llm import LLM, load

DEPTH = 10  # tokens that each level proposes at each position
COSTS = {
    "CPU: float32, AVX-512 (passes-smollm2-avx512.json)": (0.08, 0.28, 0.013, 0.017),
    "GPU: a quantized step is .27 of a pass": (0.07, 0.27, 0.0, 0.0),
    "GPU: a quantized step is .61 of a pass": (0.18, 0.61, 0.0, 0.0),
}
"""Assumed plain steps: a step of the exit head, of the quantized model, a further token in a pass of it, and of verify."""
MATCHES, LENGTHS = (0, 2, 3, 4, 6), range(8)
Position = tuple[int, ...]
"""Tokens from a position on that quantized model, exit head and text have right; in which exit head and text agree with the
quantized model; that the text proposes; and those before the position that occurred before."""


class Scheme(NamedTuple):
    """A round: text that repeats ``text`` tokens is verified at once. Else ``quantized`` tokens are drafted; for them the text
    drafts if it repeats ``within`` tokens, or the exit head ``head`` tokens. Or ``head`` tokens are verified. 0: never."""

    text: int
    quantized: int
    within: int
    head: int


def cost(row: Sequence[Position], scheme: Scheme, costs: tuple[float, ...], ideal: bool) -> float:
    """Plain steps that a prompt's tokens take. ``ideal``: each level drafts exactly the right tokens, not the scheme's."""
    head, quantized, more_quantized, more_verify = costs
    total, at = 0.0, 0
    while at < len(row):
        right, of_head, of_text, _, _, found, match = row[at]
        drafted = 0
        if scheme.text and match >= scheme.text:
            drafted, right = of_text if ideal else found, of_text
        elif not scheme.quantized:
            drafted, right = of_head if ideal else scheme.head, of_head
            total += drafted * head
        else:
            while drafted < (right if ideal else scheme.quantized):
                _, _, _, same_head, same_text, copied, within = row[min(at + drafted, len(row) - 1)]
                copies = bool(scheme.within) and within >= scheme.within
                given, same = (copied, same_text) if copies else (scheme.head, min(scheme.head, same_head))
                total += quantized + (same if ideal else given) * (more_quantized + (0 if copies else head))
                drafted += same + 1
        total += 1 + min(drafted, DEPTH) * more_verify
        at += min(drafted, right) + 1
    return total


def record(llms: Sequence[LLM], prompt: str, new_tokens: int) -> list[Position]:
    """Decode a prompt greedily with both directories, and compare what the levels propose at every position."""
    tokens = llms[0].encode([{"role": "user", "content": prompt}] if llms[0].codec.chat_template else prompt)
    texts, chains = list[list[int]](), list[list[list[int]]]()
    for llm in llms:
        assert llm.engines.draft is not None
        with llm.session(tokens, Sampling(), max_new_tokens=new_tokens + DEPTH, draft=False, ignore_eos=True) as session:
            session.prefill()
            drafter = ChainDrafter(session, llm.engines.draft, Sampling(), llm.manifest.geometry.vocab_size, llm.draft_columns)
            chains.append([])
            while session.finish_reason is None:
                chains[-1] += [drafter.draft(DEPTH)[0]] if len(chains[-1]) < new_tokens else []
                session.step()
            texts.append(session.tokens[len(tokens) :])
    if texts[0] != texts[1]:
        raise EESDError("The directories give different texts; export both of one model with weights of one type.")
    automaton, found = SuffixAutomaton(), list[Position]()
    for at, token in enumerate([*tokens, *texts[0]][: len(tokens) + new_tokens - 1], 1 - len(tokens)):
        automaton.extend(token)
        if at >= 0:
            match, rest, own, head = automaton.repeated(), texts[0][at:], chains[0][at], chains[1][at]
            copied = [one.token for one in islice(automaton.continuations(match), DEPTH)]
            pairs = (own, rest), (head, rest), (copied, rest), (head, own), (copied, own)
            equal = (int(np.cumprod([a == b for a, b in zip(*pair, strict=False)]).sum()) for pair in pairs)
            found.append((*equal, len(copied), match.length))
    return found


def compared(rows: Sequence[Sequence[Position]], costs: tuple[float, ...], ideal: bool) -> list[list[str]]:
    """Lines of a table: the best scheme of each kind, its speed over plain decoding, and that of three levels over two."""
    found = [Scheme(*numbers) for numbers in product(MATCHES, LENGTHS, MATCHES, LENGTHS)]
    two = [one for one in found if not one.within and not (one.quantized and one.head)]
    three = [one for one in found if one.quantized and (one.head or one.within)]
    kinds = {"exit head": [one for one in two if not one.text and not one.quantized]}
    kinds |= {"quantized": [one for one in two if not one.text and not one.head]}
    kinds |= {"text": [one for one in two if not one.quantized and not one.head], "two levels": two}
    kinds |= {"three levels, without text within": [one for one in three if not one.within], "three levels": three}
    tried = {one: [cost(row, one, costs, ideal) for row in rows] for one in two + three}
    best = {kind: min(some, key=lambda one: (sum(tried[one]), one)) for kind, some in kinds.items()}
    tokens, name = sum(map(len, rows)), " if lengths were known" if ideal else ""
    lines = [[kind + name, f"{tokens / sum(tried[one]):.2f}x", "" if ideal else str(one)] for kind, one in best.items()]
    gain = bootstrap_ratio(tried[best["two levels"]], tried[best["three levels"]])
    return [*lines, [f"three over two levels{name}", gain.shown(unit="x", bold=False), ""]]


@cli.command()
@click.argument("trace", type=cli.PATH)
@click.option("--engines", type=cli.PATH, nargs=2, help="Directories of one model: the whole of it drafts; an exit head does.")
@click.option("--prompts", type=cli.PATH, help="JSON lines with prompts.")
@click.option("--size", type=click.IntRange(1, 10**4), nargs=2, default=(20, 64), help="Prompts, and tokens of each.")
def main(trace: Path, engines: tuple[Path, Path] | None, prompts: Path | None, size: tuple[int, int]) -> None:
    """Record a TRACE, or read it, and compare rounds of two levels with rounds of three."""
    if (engines is None) != (prompts is None):
        raise EESDError("Give --engines and --prompts together to record a trace, or none of them to read one.")
    if engines and prompts:
        llms = [load(path, "ort") for path in engines]
        np.save(trace, np.array([record(llms, text, size[1]) for text in read_prompts(prompts, size[0])], np.int16))
    try:
        rows = np.load(trace, allow_pickle=False).tolist()
    except (OSError, ValueError):
        raise EESDError(f"{trace} is not a trace; record one first.") from None
    click.echo(f"{len(rows)} prompts, {len(rows[0])} tokens each")
    for name, costs in COSTS.items():
        lines = compared(rows, costs, False) + compared(rows, costs, True)
        click.echo(f"\n{name}: {costs}\n{table_text(['', 'speed', 'round'], lines)}")


if __name__ == "__main__":
    main()
