"""``eesd-bench``: measure engine directories, replay controllers on traces, write reports."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from eesd.bench.measure.results import Result, read_json, refuse_existing
from eesd.bench.measure.resumable import announce_resume, measure_engine, run_with_progress
from eesd.bench.measure.run import Bench, Options
from eesd.bench.measure.tasks import load_tasks
from eesd.bench.replay.costs import COST_MODELS
from eesd.bench.replay.simulation import MEASURED, Simulation, find_costs, run_simulation
from eesd.bench.replay.traces import (
    TRACE_FILE,
    TUNING_TRACE_FILE,
    check_same_origin,
    check_sampling,
    load_trace,
    record_traces,
)
from eesd.bench.report.charts import draw_result
from eesd.bench.report.markdown import write_report
from eesd.common import cli
from eesd.common.charts import check_charts
from eesd.common.errors import EESDError
from eesd.runtime.decoding.drafting import DRAFTERS
from eesd.runtime.engines.backends import BACKENDS
from eesd.runtime.engines.cpu_cache import KV_CACHE_DTYPES

F = TypeVar("F", bound=Callable[..., Any])

QUICK = {"per_task": 1, "tuning_per_task": 1, "max_new_tokens": 32, "widths": "1"}
"""Values that ``--quick`` gives to options that are not on the command line."""
DEFAULT = Options()
COUNT = click.IntRange(1, 10**6)
THREADS = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help=(
        "Number of CPU threads.  [default: number of processors, minus one if there are more "
        "than four]"
    ),
)
OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace existing results in --output.")


def prompt_options(
    new_tokens: int, per_task: int, tuning_per_task: int, output: str
) -> Callable[[F], F]:
    """Return the options that all commands that run prompts have in common. The arguments are the
    defaults."""
    return cli.options(
        click.option(
            "--task",
            "tasks",
            multiple=True,
            metavar="FILE",
            help="JSON lines file of prompts; repeatable.  [default: bundled prompts]",
        ),
        click.option(
            "--temperature",
            type=cli.Number(0, 100),
            default=DEFAULT.temperature,
            help="Temperature for samplings other than greedy.",
        ),
        click.option(
            "-n",
            "--max-new-tokens",
            type=COUNT,
            default=new_tokens,
            help="Number of tokens to generate after each prompt.",
        ),
        click.option(
            "--per-task",
            type=COUNT,
            default=per_task,
            help="Maximum number of prompts per task in the results.",
        ),
        click.option(
            "--tuning-per-task",
            type=COUNT,
            default=tuning_per_task,
            help="Maximum number of prompts per task for tuning.",
        ),
        click.option("--chat", is_flag=True, help="Send prompts as chat messages."),
        click.option(
            "--seed",
            type=cli.SEED,
            default=DEFAULT.seed,
            help="Random seed for controllers and sampling.",
        ),
        click.option(
            "--backend",
            type=click.Choice(BACKENDS),
            default=DEFAULT.backend,
            help="Backend, as in eesd-run.",
        ),
        click.option(
            "--kv-cache-dtype",
            type=click.Choice(KV_CACHE_DTYPES),
            help="Type of the KV cache, as in eesd-run.",
        ),
        THREADS,
        click.option(
            "-o", "--output", type=cli.OUTPUT, default=Path(output), help="Output directory."
        ),
        OVERWRITE,
    )


def read_options(given: dict[str, Any]) -> Options:
    """Make :class:`Options` from a command's options. If ``--quick`` is given, its values are
    applied."""
    if given.pop("quick"):
        source = click.get_current_context().get_parameter_source
        given |= {
            name: value for name, value in QUICK.items() if source(name) == ParameterSource.DEFAULT
        }
    for name, option in {"widths": "--tree-widths", "budgeted": "--budgeted"}.items():
        try:
            given[name] = tuple(int(width) for width in given[name].split())
        except ValueError:
            raise EESDError(
                f"{option} {given[name]!r} is not a list of whole numbers separated by spaces."
            ) from None
    given |= {name: tuple(given[name].split()) for name in ("controllers", "samplings")}
    return Options(**{item.name: given[item.name] for item in fields(Options)})


CHARTS = click.option(
    "--charts",
    is_flag=True,
    help="Also plot the speed-up and the acceptance in charts.svg. Needs matplotlib.",
)
CHART = "charts.svg"


def show_report(results: Sequence[Result], simulations: Sequence[Simulation], path: Path) -> None:
    """Write the report next to the JSON file at ``path``, and print it."""
    report = path.with_name("report.md")
    write_report(results, simulations, report)
    click.echo(report.read_text("utf-8"))
    click.echo(f"{path}, {report}", err=True)


@cli.group(invoke_without_command=True)
@click.option(
    "--engine-dir",
    "directories",
    type=cli.PATH,
    multiple=True,
    help="Engine directory to measure; repeatable.",
)
@click.option(
    "--controllers",
    default=" ".join(DEFAULT.controllers),
    help="Controllers to measure. The draft length of fixed is tuned first.",
)
@click.option(
    "--tree-widths",
    "widths",
    default=" ".join(map(str, DEFAULT.widths)),
    help="Tree widths to measure. 1 is a chain.",
)
@click.option(
    "--drafter", type=click.Choice([*DRAFTERS]), default=DEFAULT.drafter, help="Source of drafts."
)
@click.option("--budgeted", default="", help="Tree widths to measure also with a tree budget.")
@click.option(
    "--samplings",
    default=" ".join(DEFAULT.samplings),
    help="Samplings to measure: greedy, coupled, rejection.",
)
@click.option(
    "--guard/--no-guard",
    default=DEFAULT.guard,
    help="Pause drafting while it is slower than plain decoding.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Take about a minute, with few prompts, few tokens, and chains only.",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted run in --output.")
@CHARTS
@prompt_options(DEFAULT.max_new_tokens, DEFAULT.per_task, DEFAULT.tuning_per_task, "bench-results")
@click.pass_context
def main(
    context: click.Context, /, directories: tuple[Path, ...], charts: bool, **given: Any
) -> None:
    """Measure drafting against plain decoding. Every combination of controller, tree width and
    sampling is measured, and all tokens are compared.

    The values of a list are separated by spaces. If several engine directories are given (such as
    exit heads of one model), all are measured.
    """
    if context.invoked_subcommand is not None:
        return
    if not directories:
        raise EESDError(
            "--engine-dir is missing; give a directory that eesd-export wrote, or a "
            "subcommand (see --help)."
        )
    names = [directory.resolve().name for directory in directories]
    if len({*names}) < len(names):
        raise EESDError("Two engine directories have the same name; names must be unique.")
    options = read_options(given)
    prompts = load_tasks(options.tasks)
    path = given["output"] / "result.json"
    if charts:
        check_charts(path.with_name(CHART))
    result = Result("run", options.to_dict(), {}, []).begun(
        path, given["resume"], given["overwrite"]
    )
    with announce_resume(path):
        for name, directory in zip(names, directories, strict=True):
            bench = Bench(directory, options.backend, options.threads, options.kv_cache_dtype)
            measure_engine(result, path, name, bench, prompts, options)
    result.complete = True
    result.save(path)
    show_report([result], [], path)
    if charts:
        draw_result(result, path.with_name(CHART))
        click.echo(path.with_name(CHART), err=True)


def _refuse_recording_options(names: Iterable[str]) -> None:
    """Raise :class:`EESDError` if one of these options is on the command line."""
    context = click.get_current_context()
    for option in context.command.params:
        if (
            option.name in names
            and context.get_parameter_source(option.name) != ParameterSource.DEFAULT
        ):
            raise EESDError(
                f"{option.opts[-1]} is for recording traces and has no effect with --trace; "
                "remove it."
            )


@main.command(context_settings=cli.HELP)
@click.option(
    "--engine-dir",
    type=cli.PATH,
    help="Engine directory to record traces with.",
)
@click.option("--trace", type=cli.PATH, help="Recorded trace to replay. Needs --tuning-trace.")
@click.option("--tuning-trace", type=cli.PATH, help="Recorded trace of the tuning prompts.")
@click.option(
    "--costs",
    multiple=True,
    default=(MEASURED, "70b"),
    help=f"Cost model: {', '.join((MEASURED, *COST_MODELS))}; repeatable.",
)
@click.option("--sampling", default="greedy", help="Sampling: greedy or coupled.")
@click.option(
    "--depth",
    type=click.IntRange(1, 512),
    default=16,
    help="Number of tokens to draft from every position.",
)
@prompt_options(128, 99, 99, "simulation")
def simulate(
    engine_dir: Path | None, trace: Path | None, tuning_trace: Path | None, **given: Any
) -> None:
    """Replay all controllers on recorded traces with several cost models, and compare their
    speed."""
    output, costs, depth, overwrite = (
        given.pop(name) for name in ("output", "costs", "depth", "overwrite")
    )
    find_costs(costs, None)
    if (trace is None) != (tuning_trace is None) or (trace is None) == (engine_dir is None):
        raise EESDError(
            "Give --engine-dir to record traces, or both --trace and --tuning-trace to replay "
            "recorded traces."
        )
    if engine_dir is None:
        _refuse_recording_options((*given, "depth"))
    options = Options(samplings=(given.pop("sampling"),), widths=(1,), **given)
    result = output / "simulation.json"
    if not overwrite:
        refuse_existing(
            result, *((output / TRACE_FILE, output / TUNING_TRACE_FILE) if engine_dir else ())
        )
    if engine_dir is not None:
        check_sampling(options.sampling(options.samplings[0], 0))
        prompts = load_tasks(options.tasks)
        bench = Bench(engine_dir, options.backend, options.threads, options.kv_cache_dtype)
        run_with_progress("recording", record_traces(bench, prompts, options, depth, output))
        trace = output / TRACE_FILE
        tuning_trace = output / TUNING_TRACE_FILE
    assert trace is not None and tuning_trace is not None
    pair = load_trace(trace), load_trace(tuning_trace)
    check_same_origin(*pair)
    simulation = Simulation.prepare(*pair, costs)
    run_with_progress("replaying", run_simulation(simulation, *pair))
    output.mkdir(parents=True, exist_ok=True)
    simulation.save(result)
    show_report([], [simulation], result)


@main.command(context_settings=cli.HELP)
@click.argument("files", nargs=-1, required=True, type=cli.PATH)
@click.option("-o", "--output", type=cli.OUTPUT, required=True, help="Markdown file to write.")
def report(files: tuple[Path, ...], output: Path) -> None:
    """Write Markdown from FILES that eesd-bench wrote."""
    replayed = [path for path in files if Simulation.wrote(read_json(path))]
    measured = [Result.load(path) for path in files if path not in replayed]
    write_report(measured, [Simulation.load(path) for path in replayed], output)
    click.echo(output)


if __name__ == "__main__":
    main()
