"""``eesd-bench``: measure an engine directory and its parts, replay controllers on traces, write reports."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import click
import numpy as np
from click.core import ParameterSource

from eesd.bench.ablation import ablate, parse_head
from eesd.bench.draft_vocab import count_tokens, coverage_table, time_draft_steps
from eesd.bench.measure.fresh_starts import measure_starts, read_prompts
from eesd.bench.measure.results import Result, read_json
from eesd.bench.measure.resumable import ResumableRun, refuse_existing, run_with_progress
from eesd.bench.measure.run import Bench, Options
from eesd.bench.measure.tasks import LOADERS, load_tasks
from eesd.bench.peers.results import Result as Peers
from eesd.bench.peers.results import is_comparison
from eesd.bench.peers.table import markdown as peers_section
from eesd.bench.questions.results import Result as Questions
from eesd.bench.questions.results import is_questions
from eesd.bench.questions.run import answer_questions
from eesd.bench.questions.table import markdown as spec_bench_tables
from eesd.bench.replay.costs import COST_MODELS
from eesd.bench.replay.round_log import replay_rounds
from eesd.bench.replay.simulation import MEASURED, Simulation, find_costs, is_simulation, run_simulation
from eesd.bench.replay.starts import HEADS, MACHINES, simulate_starts, table
from eesd.bench.replay.traces import (
    TRACE_FILE,
    TUNING_TRACE_FILE,
    TraceRecorder,
    check_same_origin,
    check_sampling,
    load_trace,
)
from eesd.bench.report.markdown import write_report
from eesd.bench.report.plots import check_plots
from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.terminal import progress_bar
from eesd.common.weights import DTYPES
from eesd.controllers import make_controller
from eesd.runtime.engines.backends import BACKENDS
from eesd.runtime.llm import DRAFTERS, Speculation
from eesd.runtime.text import TextCodec

F = TypeVar("F", bound=Callable[..., Any])

QUICK = {"per_task": 1, "tuning_per_task": 1, "max_new_tokens": 32, "widths": "1"}
"""Values that ``--quick`` gives to options that are not on the command line."""
DEFAULT = Options()
COUNT = click.IntRange(1, 10**6)


def _all(options: Iterable[Callable[[F], F]]) -> Callable[[F], F]:
    """One decorator that adds several options, in this order."""

    def decorate(command: F) -> F:
        for option in reversed([*options]):
            command = option(command)
        return command

    return decorate


def prompt_options(new_tokens: int, per_task: int, tuning_per_task: int, output: str) -> Callable[[F], F]:
    """Options of all commands that run prompts, with these defaults."""
    return _all(
        [
            click.option(
                "--task",
                "tasks",
                multiple=True,
                metavar="NAME=FILE",
                help=f"Prompts to run; NAME: {', '.join(LOADERS)}. Default: bundled.",
            ),
            click.option(
                "--temperature",
                type=cli.Number(0, 100),
                default=DEFAULT.temperature,
                help="Temperature of the samplings that are not greedy.",
            ),
            click.option(
                "-n", "--max-new-tokens", type=COUNT, default=new_tokens, help="Tokens to generate behind each prompt."
            ),
            click.option("--per-task", type=COUNT, default=per_task, help="Largest number of reported prompts of each task."),
            click.option(
                "--tuning-per-task", type=COUNT, default=tuning_per_task, help="Largest number of tuning prompts of each task."
            ),
            click.option("--chat", is_flag=True, help="Send prompts as chat messages."),
            click.option("--seed", type=cli.SEED, default=DEFAULT.seed, help="Seed of controllers and sampling."),
            click.option("--backend", type=click.Choice(BACKENDS), default=DEFAULT.backend),
            click.option(
                "--threads", type=click.IntRange(1, 1024), help="CPU threads.  [default: processors, one fewer if over four]"
            ),
            click.option("-o", "--output", type=cli.PATH, default=Path(output), help="Directory to write."),
            click.option("--resume", is_flag=True, help="Continue an interrupted run in --output."),
            click.option("--overwrite", is_flag=True, help="Replace existing results in --output."),
            click.option("--plots/--no-plots", default=True, help="Also draw plots (needs matplotlib)."),
        ]
    )


def measurement_options(controllers: Iterable[str], samplings: Iterable[str]) -> Callable[[F], F]:
    """Options of all measurements, with these defaults."""
    return _all(
        [
            click.option(
                "--controllers", default=" ".join(controllers), help="Separated by spaces. fixed and threshold are tuned."
            ),
            click.option(
                "--tree-widths",
                "widths",
                default=" ".join(map(str, DEFAULT.widths)),
                help="Separated by spaces. 1 drafts a chain.",
            ),
            click.option("--drafter", type=click.Choice(DRAFTERS), default=DEFAULT.drafter, help="What drafts."),
            click.option("--budgeted", default="", help="Tree widths to measure also with a tree budget."),
            click.option("--samplings", default=" ".join(samplings), help="greedy, coupled, rejection; separated by spaces."),
            click.option(
                "--guard/--no-guard", default=DEFAULT.guard, help="Pause drafting while it is slower than plain decoding."
            ),
            click.option("--quick", is_flag=True, help="Take about a minute: few prompts, few tokens, chains only."),
            prompt_options(DEFAULT.max_new_tokens, DEFAULT.per_task, DEFAULT.tuning_per_task, "bench-results"),
        ]
    )


def read_options(given: dict[str, Any]) -> Options:
    """Make :class:`Options` from a command's options, with ``--quick`` applied. Removes them from ``given``."""
    if given.pop("quick"):
        source = click.get_current_context().get_parameter_source
        given |= {name: value for name, value in QUICK.items() if source(name) == ParameterSource.DEFAULT}
    names = [name for name in DEFAULT.to_dict() if name in given]
    values: dict[str, Any] = {name: given.pop(name) for name in names}
    for name, option in {"widths": "--tree-widths", "budgeted": "--budgeted"}.items():
        try:
            values[name] = tuple(int(width) for width in values[name].split())
        except ValueError:
            raise EESDError(f"{option} {values[name]!r} is not a list of whole numbers separated by spaces.") from None
    values |= {name: tuple(values[name].split()) for name in ("controllers", "samplings")}
    return Options(**values)


@contextmanager
def announce_resume(path: Path) -> Iterator[None]:
    """On Ctrl-C say how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        if path.exists():
            click.echo(f"\n{path} has the results so far; continue with --resume.", err=True)
        raise


@contextmanager
def finishing(run: ResumableRun, plots: bool) -> Iterator[None]:
    """Mark the run as complete after the ``with`` block, and write its report."""
    with announce_resume(run.path):
        yield
    run.finish()
    show_report([run.result], [], run.path, plots)


def show_report(results: Sequence[Result], simulations: Sequence[Simulation], path: Path, plots: bool) -> None:
    """Write the report beside the JSON file at ``path``, and print it."""
    report = path.with_name("report.md")
    write_report(results, simulations, report, plots)
    click.echo(report.read_text("utf-8"))
    click.echo(f"{path}, {report}", err=True)


@cli.group(invoke_without_command=True)
@click.option("--engine-dir", type=cli.PATH, help="Directory that eesd-export wrote.")
@measurement_options(DEFAULT.controllers, DEFAULT.samplings)
@click.pass_context
def main(context: click.Context, /, engine_dir: Path | None, **given: Any) -> None:
    """Measure drafting against plain decoding, for every controller, tree width and sampling, and compare all tokens."""
    if context.invoked_subcommand is not None:
        return
    if engine_dir is None:
        raise EESDError("--engine-dir is missing; give a directory that eesd-export wrote, or a subcommand (see --help).")
    options = read_options(given)
    check_plots(given["plots"])
    prompts = load_tasks(options.tasks)
    run = ResumableRun("run", options, given["output"], given["resume"], given["overwrite"])
    bench = Bench(engine_dir, options.backend, options.threads)
    with finishing(run, given["plots"]):
        run.measure_engine(bench.manifest.model, bench, prompts, options)


@main.command(context_settings=cli.HELP)
@click.option("--model", type=cli.NAME, help="Base model of the heads. Not needed for engine directories.")
@click.option("--head", "heads", multiple=True, required=True, metavar="NAME[=DIR]", help="Exit head; repeatable.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", help="Element type of exports.")
@measurement_options(("threshold", "beta-ts", "calibration-ts", "cost-aware-ts"), ("greedy",))
def ablation(model: str | None, heads: tuple[str, ...], dtype: str, **given: Any) -> None:
    """Measure what each part contributes: every head with fixed draft lengths, the last one also with trees and controllers.

    --head NAME=DIR names an exit head, which is exported into a temporary directory, or an engine directory. --head NAME is an
    initialised head without training. All fixed lengths are measured, and the best in hindsight is reported.
    """
    options = read_options(given)
    check_plots(given["plots"])
    parts = [parse_head(head) for head in heads]
    prompts = load_tasks(options.tasks)
    run = ResumableRun("ablation", options, given["output"], given["resume"], given["overwrite"])
    with finishing(run, given["plots"]):
        ablate(run, parts, model, dtype, prompts)


def _refuse_recording_options(names: Iterable[str]) -> None:
    """Raise :class:`EESDError` if one of these options is on the command line."""
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in names and context.get_parameter_source(option.name) != ParameterSource.DEFAULT:
            raise EESDError(f"{option.opts[-1]} is for recording traces and has no effect with --trace; remove it.")


@main.command(context_settings=cli.HELP)
@click.option("--engine-dir", type=cli.PATH, help="Record traces with this directory, which eesd-export wrote.")
@click.option("--trace", type=cli.PATH, help="Replay this recorded trace; needs --tuning-trace.")
@click.option("--tuning-trace", type=cli.PATH, help="Recorded trace of the tuning prompts.")
@click.option("--costs", multiple=True, default=(MEASURED, "70b"), help=f"{', '.join((MEASURED, *COST_MODELS))}; repeatable.")
@click.option("--sampling", default="greedy", help="greedy or coupled.")
@click.option("--depth", type=click.IntRange(1, 512), default=16, help="Tokens to draft from every position.")
@prompt_options(128, 99, 99, "simulation")
def simulate(engine_dir: Path | None, trace: Path | None, tuning_trace: Path | None, **given: Any) -> None:
    """Replay all controllers on recorded traces under several cost models, and compare their speed."""
    plots, output, costs, depth = (given.pop(name) for name in ("plots", "output", "costs", "depth"))
    resume, overwrite = given.pop("resume"), given.pop("overwrite")
    check_plots(plots)
    find_costs(costs, None)
    if (trace is None) != (tuning_trace is None) or (trace is None) == (engine_dir is None):
        raise EESDError("Give --engine-dir to record traces, or both --trace and --tuning-trace to replay recorded traces.")
    if engine_dir is None:
        _refuse_recording_options((*given, "depth"))
    options = Options(samplings=(given.pop("sampling"),), widths=(1,), **given)
    result = output / "simulation.json"
    written = [result] if engine_dir is None else [result, output / TRACE_FILE, output / TUNING_TRACE_FILE]
    if not (resume or overwrite):
        refuse_existing(*written)
    if engine_dir is not None:
        check_sampling(options.sampling(options.samplings[0], 0))
        prompts = load_tasks(options.tasks)
        bench = Bench(engine_dir, options.backend, options.threads)
        recorder = TraceRecorder(bench, prompts, options, depth, output, resume)
        trace, tuning_trace = output / TRACE_FILE, output / TUNING_TRACE_FILE
        with announce_resume(tuning_trace):
            run_with_progress("recording", recorder.run())
    assert trace is not None and tuning_trace is not None
    pair = load_trace(trace), load_trace(tuning_trace)
    check_same_origin(*pair)
    simulation = Simulation.prepare(*pair, costs)
    run_with_progress("replaying", run_simulation(simulation, *pair))
    output.mkdir(parents=True, exist_ok=True)
    simulation.save(result)
    show_report([], [simulation], result, plots)


@main.command(context_settings=cli.HELP)
@click.option("--trace", type=cli.PATH, help="Decode what simulate --engine-dir recorded, instead of made-up texts.")
@click.option("--costs", help=f"{', '.join((MEASURED, *COST_MODELS))}.  [default: 4bit, with --trace measured]")
@click.option("--controller", default=Speculation().controller, help="Controller and its options.")
@click.option("--starts", type=click.IntRange(1, 10_000), default=200, help="Processes of each head and machine.")
@click.option("--engine-dir", type=cli.PATH, help="Measure real processes with this directory instead; needs --prompts.")
@click.option("--prompts", type=cli.PATH, help="JSON lines with prompts; each process decodes one.")
@click.option("--drafter", type=click.Choice(DRAFTERS), default=Speculation().drafter, help="What drafts in real processes.")
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads of real processes.")
@click.option("-n", "--max-new-tokens", type=COUNT, default=100, help="Tokens of a real process.")
def starts(trace: Path | None, costs: str | None, controller: str, starts: int, **real: Any) -> None:
    """Simulate fresh processes, with noise, load, stalls and a burst, or measure real ones. Shows what drafting costs them."""
    if (real["engine_dir"] is None) != (real["prompts"] is None) or (trace is not None and real["prompts"] is not None):
        raise EESDError("Give --engine-dir and --prompts together to measure real processes, and neither with --trace.")
    if real["prompts"] is not None:
        prompts, found = read_prompts(real["prompts"], starts), []
        measured = measure_starts(real["engine_dir"], prompts, real["drafter"], real["threads"], real["max_new_tokens"])
        with progress_bar("starting", starts) as advance:
            for speed in measured:
                found.append(speed)
                advance(1)
        few = sum(speed < 0.98 for speed in found)
        click.echo(
            f"speed over plain decoding: least {min(found):.3f}, median {median(found):.3f}, below 0.98 {few} of {starts}"
        )
        return
    make_controller(controller)
    recorded = load_trace(trace) if trace else None
    name = costs or (MEASURED if recorded else "4bit")
    if recorded is None and name == MEASURED:
        raise EESDError(f"Only a --trace has measured costs; give --costs with one of {', '.join(COST_MODELS)}.")
    model = find_costs([name], recorded).get(name) or COST_MODELS[name]
    heads = {"recorded": recorded} if recorded else HEADS
    click.echo("worst / 5 % / median of each")
    for head, machine in product(heads, MACHINES):
        click.echo(table(head, machine, [*simulate_starts(heads[head], model, machine, controller, starts)]))


@main.command("draft-vocab", context_settings=cli.HELP)
@click.option("--model", type=cli.NAME, required=True, help="Model directory or Hugging Face id: its tokenizer counts.")
@click.option("--count", "counted", type=cli.PATH, multiple=True, required=True, help="Text to choose tokens by; repeatable.")
@click.option("--text", "tested", type=cli.PATH, multiple=True, required=True, help="Text to test; repeatable.")
@click.option("--sizes", default="4096 8192 16384", help="Sizes of draft vocabularies, separated by spaces.")
def draft_vocab(model: str, counted: tuple[Path, ...], tested: tuple[Path, ...], sizes: str) -> None:
    """Show which share of a text's tokens the draft vocabularies of several sizes have, by the lines' category."""
    from eesd.model.config import load_config
    from eesd.model.hub import find_model

    directory = find_model(model)
    config, codec = load_config(directory), TextCodec(directory)
    vocab_size = config.geometry.vocab_size
    if not sizes.split() or not all(size.isdecimal() and 1 < int(size) <= vocab_size for size in sizes.split()):
        raise EESDError(f"--sizes {sizes!r} is not a list of whole numbers from 2 to {vocab_size} separated by spaces.")
    total = sum(sum(count_tokens(path, codec, vocab_size).values()) for path in counted)
    categories = {name: counts for path in tested for name, counts in count_tokens(path, codec, vocab_size).items()}
    click.echo(coverage_table(np.asarray(total), categories, [int(size) for size in sizes.split()], config.eos_token_ids))


@main.command("draft-steps", context_settings=cli.HELP)
@click.argument("directories", nargs=-1, required=True, type=cli.PATH)
@click.option("--threads", type=click.IntRange(1, 1024), default=2, help="CPU threads.")
@click.option("--rounds", type=COUNT, default=50, help="Turns of each directory.")
def draft_steps(directories: tuple[Path, ...], threads: int, rounds: int) -> None:
    """Time a draft step of engine DIRECTORIES in turn, with ONNX Runtime on the CPU."""
    click.echo(time_draft_steps(directories, threads, rounds))


@main.command("replay-rounds", context_settings=cli.HELP)
@click.argument("file", type=cli.PATH)
def replay_log(file: Path) -> None:
    """Repeat the decisions in a FILE that eesd-run --log-rounds wrote, and show those that differ."""
    rounds, differences = replay_rounds(file)
    for found in differences[:20]:
        click.echo(f"line {found.line}, {found.call}: {found.recorded} recorded, {found.replayed} now")
    click.echo(f"{rounds} rounds, {len(differences)} answers differ")


@main.command("spec-bench", context_settings=cli.HELP)
@click.option("--questions", type=cli.PATH, required=True, help="Spec-Bench's question.jsonl.")
@click.option("--engine-dir", "directories", type=cli.PATH, multiple=True, required=True, help="Engine directory; repeatable.")
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=("exit", "text", "both", "both,budget"),
    metavar="DRAFTER[,budget][,tree=W][,CONTROLLER]",
    help="What drafts, and how; repeatable.",
)
@click.option("--samplings", default="greedy", help="greedy, coupled (temperature 0.7); separated by spaces.")
@click.option("--per-category", type=COUNT, default=80, help="Largest number of questions of a category.")
@click.option("-n", "--max-new-tokens", type=COUNT, default=256, help="Tokens of an answer, at most.")
@click.option("--backend", type=click.Choice(BACKENDS), default=DEFAULT.backend)
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads.  [default: processors, one fewer if over four]")
@click.option("-o", "--output", type=cli.PATH, default=Path("spec-bench.json"), help="Result to write.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@click.option("--overwrite", is_flag=True, help="Replace an existing result.")
def spec_bench(directories: tuple[Path, ...], output: Path, resume: bool, overwrite: bool, **given: Any) -> None:
    """Answer Spec-Bench's questions plainly and drafted, and print its table.

    The file is in https://github.com/hemingkx/Spec-Bench (data/spec_bench/question.jsonl, Apache-2.0).
    """
    given["samplings"] = tuple(given["samplings"].split())
    with announce_resume(output):
        result = answer_questions(directories, output, resume, overwrite, **given)
    click.echo("\n".join(spec_bench_tables(result)))


@main.command(context_settings=cli.HELP)
@click.argument("results", nargs=-1, required=True, type=cli.PATH)
@click.option("-o", "--output", type=cli.PATH, default=Path("docs/results.md"), help="Markdown to write.")
@click.option("--plots/--no-plots", default=True, help="Also draw plots (needs matplotlib).")
def report(results: tuple[Path, ...], output: Path, plots: bool) -> None:
    """Write Markdown and plots from RESULTS: result.json and simulation.json files, those of spec-bench, and comparisons."""
    check_plots(plots)
    files = {path: read_json(path) for path in results}
    replayed = [path for path, raw in files.items() if is_simulation(raw)]
    compared = [path for path, raw in files.items() if is_comparison(raw)]
    asked = [path for path, raw in files.items() if is_questions(raw)]
    measured = [Result.load(path) for path in files if path not in (*replayed, *compared, *asked)]
    simulations = [Simulation.load(path) for path in replayed]
    questions = [Questions.load(path) for path in asked]
    first = [line for one in questions for line in spec_bench_tables(one, "##", published=one is questions[-1])]
    first += [line for path in compared for line in peers_section(Peers.load(path), "##")]
    write_report(measured, simulations, output, plots, first)
    click.echo(output)


if __name__ == "__main__":
    main()
