"""``eesd-bench``: measure an engine directory, take its parts apart, replay controllers on traces of it, write reports."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from eesd.bench.ablation import ablate, parse_head
from eesd.bench.campaign import Campaign, check_new, follow
from eesd.bench.costs import COST_MODELS
from eesd.bench.plots import check_plots
from eesd.bench.recording import TRACE, TUNING, Recording, check_pair
from eesd.bench.report import write_report
from eesd.bench.results import Result, read_json
from eesd.bench.run import Bench, Options
from eesd.bench.simulation import MEASURED, Simulation, find_costs, is_simulation, simulate_all
from eesd.bench.tasks import LOADERS, load_tasks
from eesd.bench.traces import check_sampling, load_trace
from eesd.common.cli import one_line_errors
from eesd.common.errors import EESDError
from eesd.runtime.engines.backends import BACKENDS

F = TypeVar("F", bound=Callable[..., Any])

HELP = {"help_option_names": ["-h", "--help"], "show_default": True}
QUICK = {"per_task": 1, "tuning_per_task": 1, "max_new_tokens": 32, "widths": "1"}
"""What ``--quick`` makes of the options that are not given."""
DEFAULT = Options()


def _all(options: Iterable[Callable[[F], F]]) -> Callable[[F], F]:
    """Several options as one decorator, in their order."""

    def decorate(command: F) -> F:
        for option in reversed([*options]):
            command = option(command)
        return command

    return decorate


def common(new_tokens: int, per_task: int, tuning_per_task: int, output: str) -> Callable[[F], F]:
    """The options of everything that runs prompts and keeps what it found, with these defaults."""
    return _all(
        [
            click.option("--task", "tasks", multiple=True, metavar="NAME=FILE", help=f"Prompts; NAME: {', '.join(LOADERS)}."),
            click.option("--temperature", default=DEFAULT.temperature, help="Of the samplings that are not greedy."),
            click.option("-n", "--max-new-tokens", default=new_tokens),
            click.option("--per-task", default=per_task, help="Prompts of each task to report, at most."),
            click.option("--tuning-per-task", default=tuning_per_task, help="Other prompts of each task to tune on."),
            click.option("--chat", is_flag=True, help="Give prompts as chat messages."),
            click.option("--seed", default=DEFAULT.seed),
            click.option("--backend", type=click.Choice(BACKENDS), default=DEFAULT.backend),
            click.option("--threads", type=int, help="CPU threads of an engine.  [default: the processors of this process]"),
            click.option("-o", "--output", type=click.Path(path_type=Path), default=Path(output), help="Directory."),
            click.option("--resume", is_flag=True, help="Go on with what was interrupted in --output."),
            click.option("--overwrite", is_flag=True, help="Replace what is in --output."),
            click.option("--plots/--no-plots", default=True, help="Draw the plots, too (needs matplotlib)."),
        ]
    )


def measuring(controllers: Iterable[str], samplings: Iterable[str]) -> Callable[[F], F]:
    """The options that all measurements share, with these defaults."""
    return _all(
        [
            click.option("--controllers", default=" ".join(controllers), help="Separated by spaces; fixed, threshold: tuned."),
            click.option("--tree-widths", "widths", default=" ".join(map(str, DEFAULT.widths)), help="1 drafts a chain."),
            click.option("--budgeted", default="", help="Tree widths to measure with a tree budget, too."),
            click.option("--samplings", default=" ".join(samplings), help="Separated by spaces."),
            click.option("--guard/--no-guard", default=DEFAULT.guard, help="Rest drafting where it does not pay."),
            click.option("--quick", is_flag=True, help="About a minute: few prompts, few tokens, chains."),
            common(DEFAULT.max_new_tokens, DEFAULT.per_task, DEFAULT.tuning_per_task, "bench-results"),
        ]
    )


def read_options(given: dict[str, Any]) -> Options:
    """The measurement's options of a command's, ``--quick`` applied; takes them out of ``given``."""
    if given.pop("quick"):
        source = click.get_current_context().get_parameter_source
        given |= {name: value for name, value in QUICK.items() if source(name) == ParameterSource.DEFAULT}
    names = [name for name in DEFAULT.to_dict() if name in given]
    values: dict[str, Any] = {name: given.pop(name) for name in names}
    for name, option in {"widths": "--tree-widths", "budgeted": "--budgeted"}.items():
        try:
            values[name] = tuple(int(width) for width in values[name].split())
        except ValueError:
            raise EESDError(f"{option} {values[name]} are not whole numbers separated by spaces.") from None
    values |= {name: tuple(values[name].split()) for name in ("controllers", "samplings")}
    return Options(**values)


@contextmanager
def resumable(path: Path) -> Iterator[None]:
    """On Ctrl-C say that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        if path.exists():
            click.echo(f"\n{path} has what was measured; go on with --resume.", err=True)
        raise


@contextmanager
def kept(campaign: Campaign, plots: bool) -> Iterator[None]:
    """Finish the campaign and write its report."""
    with resumable(campaign.path):
        yield
    campaign.finish()
    show_report([campaign.result], [], campaign.path, plots)


def show_report(results: Sequence[Result], simulations: Sequence[Simulation], path: Path, plots: bool) -> None:
    """Write the report beside the JSON file that it is made of, and print it."""
    report = path.with_name("report.md")
    write_report(results, simulations, report, plots)
    click.echo(report.read_text("utf-8"))
    click.echo(f"{path}, {report}", err=True)


@click.group(invoke_without_command=True, context_settings=HELP)
@click.option("--engine-dir", type=click.Path(path_type=Path), help="Directory made by eesd-export.")
@measuring(DEFAULT.controllers, DEFAULT.samplings)
@click.pass_context
@one_line_errors
def main(context: click.Context, /, engine_dir: Path | None, **given: Any) -> None:
    """Measure drafting against plain decoding: every controller x chain and tree x sampling, token by token the same."""
    if context.invoked_subcommand is not None:
        return
    if engine_dir is None:
        raise EESDError("--engine-dir is missing; give a directory made by eesd-export, or a subcommand (--help).")
    options = read_options(given)
    check_plots(given["plots"])
    prompts = load_tasks(options.tasks)
    campaign = Campaign("run", options, given["output"], given["resume"], given["overwrite"])
    bench = Bench(engine_dir, options.backend, options.threads)
    with kept(campaign, given["plots"]):
        campaign.add(bench.manifest.model, bench, prompts, options)


@main.command(context_settings=HELP)
@click.option("--model", help="Model that the heads belong to; not needed for engine directories.")
@click.option("--head", "heads", multiple=True, required=True, metavar="NAME[=DIR]")
@click.option("--dtype", type=click.Choice(("float32", "float16", "bfloat16")), default="float32", help="To export with.")
@measuring(("threshold", "beta-ts", "calibration-ts", "cost-aware-ts"), ("greedy",))
@one_line_errors
def ablation(model: str | None, heads: tuple[str, ...], dtype: str, **given: Any) -> None:
    """What each part contributes: heads in the order given, then with the last one trees and controllers.

    --head NAME=DIR is a trained exit head, exported into a temporary directory, or an engine directory as it is; NAME alone is
    a head that was only initialised. Fixed lengths are measured all, and the best in hindsight is reported.
    """
    options = read_options(given)
    check_plots(given["plots"])
    parts = [parse_head(head) for head in heads]
    prompts = load_tasks(options.tasks)
    campaign = Campaign("ablation", options, given["output"], given["resume"], given["overwrite"])
    with kept(campaign, given["plots"]):
        ablate(campaign, parts, model, dtype, prompts)


def _refuse_given(without: str, what: str, names: Iterable[str]) -> None:
    """Raise :class:`EESDError` for options on the command line that would have no effect."""
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in names and context.get_parameter_source(option.name) != ParameterSource.DEFAULT:
            raise EESDError(f"{option.opts[-1]} is for {what}, which {without} leaves out; leave the option out, too.")


@main.command(context_settings=HELP)
@click.option("--engine-dir", type=click.Path(path_type=Path), help="Directory made by eesd-export, to record traces with.")
@click.option("--trace", type=click.Path(path_type=Path), help="Replay this recorded trace instead; with --tuning-trace.")
@click.option("--tuning-trace", type=click.Path(path_type=Path), help="The recorded trace to tune on.")
@click.option("--costs", multiple=True, default=(MEASURED, "70b"), help=f"{', '.join((MEASURED, *COST_MODELS))}; repeatable.")
@click.option("--sampling", default="greedy", help="greedy or coupled.")
@click.option("--depth", default=16, help="Tokens that are drafted from every position.")
@common(128, 99, 99, "simulation")
@one_line_errors
def simulate(engine_dir: Path | None, trace: Path | None, tuning_trace: Path | None, **given: Any) -> None:
    """Replay every controller on recorded traces, under any costs: which drafts best, and what it loses against the best."""
    plots, output, costs, depth = (given.pop(name) for name in ("plots", "output", "costs", "depth"))
    keep, overwrite = given.pop("resume"), given.pop("overwrite")
    check_plots(plots)
    find_costs(costs, None)
    if (trace is None) != (tuning_trace is None) or (trace is None) == (engine_dir is None):
        raise EESDError("Give --engine-dir to record traces, or both --trace and --tuning-trace to replay recorded ones.")
    if engine_dir is None:
        _refuse_given("--trace", "recording", (*given, "depth"))
    options = Options(samplings=(given.pop("sampling"),), widths=(1,), **given)
    result = output / "simulation.json"
    written = [result] if engine_dir is None else [result, output / TRACE, output / TUNING]
    if not (keep or overwrite):
        check_new(*written)
    if engine_dir is not None:
        check_sampling(options.sampling(options.samplings[0], 0))
        prompts = load_tasks(options.tasks)
        bench = Bench(engine_dir, options.backend, options.threads)
        recording = Recording(bench, prompts, options, depth, output, keep)
        trace, tuning_trace = output / TRACE, output / TUNING
        with resumable(tuning_trace):
            follow("recording", recording.steps())
    assert trace is not None and tuning_trace is not None
    pair = load_trace(trace), load_trace(tuning_trace)
    check_pair(*pair)
    simulation = Simulation.of(*pair, costs)
    follow("replaying", simulate_all(simulation, *pair))
    output.mkdir(parents=True, exist_ok=True)
    simulation.save(result)
    show_report([], [simulation], result, plots)


@main.command(context_settings=HELP)
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("docs/results.md"), help="Markdown to write.")
@click.option("--plots/--no-plots", default=True, help="Draw the plots, too (needs matplotlib).")
@one_line_errors
def report(results: tuple[Path, ...], output: Path, plots: bool) -> None:
    """Make Markdown and plots of RESULTS: result.json and simulation.json files."""
    check_plots(plots)
    replayed = [path for path in results if is_simulation(read_json(path))]
    measured = [Result.load(path) for path in results if path not in replayed]
    write_report(measured, [Simulation.load(path) for path in replayed], output, plots)
    click.echo(output)


if __name__ == "__main__":
    main()
