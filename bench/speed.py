"""Drafting against plain decoding, side by side in one run.

    python bench/speed.py --engine-dir plans/

Every prompt is generated plainly and with each configuration in turn, so that drift of the machine hits all alike. Reported are
medians over prompts of the ratio of decode speeds (prefill, which both share, left out), whether the tokens are equal, and
where the time goes; then what one call costs: draft step, verify by node count, and our overhead over the raw session.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from eesd.runtime.errors import one_line_errors
from eesd.runtime.llm import LLM, Completion, Speculation, load
from eesd.runtime.ort_engine import OrtBinding, OrtEngine
from eesd.runtime.sampling import Sampling
from eesd.runtime.slab import KVSlab

PROMPTS = Path(__file__).parent.parent / "examples/pycode/prompts.jsonl"
NODE_COUNTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)


def run_one(llm: LLM, prompt: str, sampling: Sampling, new_tokens: int) -> Completion:
    return llm.generate(prompt, sampling, max_new_tokens=new_tokens, ignore_eos=True)


def measure(
    directory: Path, prompts: list[str], configurations: list[str], widths: list[int], sampling: Sampling, new_tokens: int
) -> list[dict[str, Any]]:
    """One result for each configuration x tree width, all against the same plain runs, prompt by prompt."""
    plain = load(directory, speculation=None)
    drafting = {
        (name, width): load(directory, speculation=Speculation(name, width)) for name in configurations for width in widths
    }
    for llm in (plain, *drafting.values()):
        run_one(llm, prompts[0], sampling, 32)
    runs: dict[tuple[str, int], list[tuple[Completion, Completion]]] = {key: [] for key in drafting}
    with click.progressbar(prompts, label=f"temperature {sampling.temperature}", file=sys.stderr) as bar:
        for prompt in bar:
            base = run_one(plain, prompt, sampling, new_tokens)
            for key, llm in drafting.items():
                runs[key].append((base, run_one(llm, prompt, sampling, new_tokens)))
    return [summarize(name, width, sampling, pairs) for (name, width), pairs in runs.items()]


def summarize(name: str, width: int, sampling: Sampling, pairs: list[tuple[Completion, Completion]]) -> dict[str, Any]:
    ratios = [drafted.stats.tokens_per_second / plain.stats.tokens_per_second for plain, drafted in pairs]
    stats = [drafted.stats for _, drafted in pairs]
    steps, rounds = sum(s.draft_steps for s in stats), sum(s.rounds for s in stats)
    plain_rounds = sum(plain.stats.verify_seconds for plain, _ in pairs) / sum(plain.stats.rounds for plain, _ in pairs)
    return {
        "controller": name,
        "tree_width": width,
        "temperature": sampling.temperature,
        "prompts": len(pairs),
        "speedup_median": statistics.median(ratios),
        "speedup_quartiles": [float(np.quantile(ratios, 0.25)), float(np.quantile(ratios, 0.75))],
        "speedup_total": sum(p.stats.decode_seconds for p, _ in pairs) / sum(d.stats.decode_seconds for _, d in pairs),
        "plain_tokens_per_second": statistics.median(p.stats.tokens_per_second for p, _ in pairs),
        "tokens_per_second": statistics.median(s.tokens_per_second for s in stats),
        "equal": sum(plain.tokens == drafted.tokens for plain, drafted in pairs),
        "acceptance": sum(map(sum, (s.accepted_at_depth for s in stats))) / sum(map(sum, (s.offered_at_depth for s in stats))),
        "tokens_per_round": sum(s.new_tokens for s in stats) / rounds,
        "draft_step_over_plain_step": sum(s.draft_seconds for s in stats) / steps / plain_rounds,
        "verify_over_plain_step": sum(s.verify_seconds for s in stats) / rounds / plain_rounds,
        "host_share": sum(s.host_seconds for s in stats) / sum(s.decode_seconds for s in stats),
        "guard_rests": sum(s.guard_rests for s in stats),
    }


def call_costs(directory: Path, slot: int = 200, repeats: int = 200) -> dict[str, Any]:
    """Median milliseconds of a draft step, of verify by node count, and of our code around the raw session's call."""
    llm = load(directory)
    slab = KVSlab(llm.manifest, 512)
    costs: dict[str, Any] = {"verify_ms": {}}
    engines: dict[str, OrtEngine] = {"draft": llm._draft, "verify": llm._verify}  # type: ignore[dict-item]
    draft, verify = (engines[kind].bind(slab) for kind in ("draft", "verify"))
    step = lambda: draft.forward([1], [slot], slot)  # noqa: E731
    calls: dict[str, Any] = {"warm": step, "raw": raw_call(draft), "draft": step}  # the first finds its weights evicted
    for count in NODE_COUNTS:
        calls[str(count)] = lambda n=count: verify.forward([1] * n, range(slot, slot + n), slot)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) * 1e3 for name, values in samples.items()}
    costs["draft_ms"] = medians["draft"]
    costs["verify_ms"] = {name: medians[name] for name in map(str, NODE_COUNTS)}
    costs["call_overhead_ms"] = medians["draft"] - medians["raw"]
    return costs


def raw_call(binding: OrtBinding) -> Any:
    """The session's own call for one node, on buffers that are bound already."""
    binding.forward([1], [200], 200)
    (_, session), io = binding._engine.stages[0], binding._bound[1].ios[0]
    return lambda: session.run_with_iobinding(io)


def markdown(results: list[dict[str, Any]], costs: dict[str, Any]) -> str:
    lines = [
        "| controller | tree | temperature | speed-up (quartiles) | tokens/s | equal | acceptance | tokens a round | host |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        low, high = r["speedup_quartiles"]
        lines.append(
            f"| {r['controller']} | {r['tree_width']} | {r['temperature']} | **{r['speedup_median']:.2f}x** "
            f"({low:.2f} to {high:.2f}) | {r['plain_tokens_per_second']:.0f} -> {r['tokens_per_second']:.0f} "
            f"| {r['equal']}/{r['prompts']} | {r['acceptance']:.2f} | {r['tokens_per_round']:.2f} | {r['host_share']:.1%} |"
        )
    plain = costs["verify_ms"]["1"]
    ratios = ", ".join(f"{n}: {ms / plain:.2f}" for n, ms in costs["verify_ms"].items())
    lines += [
        "",
        f"One plain step takes {plain:.2f} ms; a draft step costs {costs['draft_ms'] / plain:.2f} of it.",
        f"A verify pass by node count, in plain steps: {ratios}.",
        f"Overhead of one call over the raw session: {costs['call_overhead_ms'] * 1e3:.0f} microseconds.",
    ]
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--engine-dir", type=click.Path(path_type=Path), default=Path("plans"))
@click.option("--prompts", "prompt_file", type=click.Path(path_type=Path), default=PROMPTS)
@click.option("--limit", default=60, help="Prompts to use.")
@click.option("--max-new-tokens", default=128)
@click.option("--controllers", default="beta-ts fixed:k=2 fixed:k=4 threshold:p=0.6", help="Separated by spaces.")
@click.option("--tree-widths", default="1", help="Separated by spaces.")
@click.option("--temperatures", default="0 0.7", help="Separated by spaces; 0 is greedy.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the results there, too.")
@one_line_errors
def main(
    engine_dir: Path,
    prompt_file: Path,
    limit: int,
    max_new_tokens: int,
    controllers: str,
    tree_widths: str,
    temperatures: str,
    json_file: Path | None,
) -> None:
    """Measure the speed-up and print it as Markdown."""
    prompts = [json.loads(line)["prompt"] for line in prompt_file.read_text().splitlines()][:limit]
    widths = [int(width) for width in tree_widths.split()]
    results = []
    for temperature in map(float, temperatures.split()):
        sampling = Sampling(temperature=temperature)
        results += measure(engine_dir, prompts, controllers.split(), widths, sampling, max_new_tokens)
    costs = call_costs(engine_dir)
    click.echo(markdown(results, costs))
    if json_file is not None:
        json_file.write_text(json.dumps({"results": results, "costs": costs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
