"""``eesd-bench``: measure an engine directory, take a head's recipe and the controllers apart, write reports."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from eesd.bench.ablation import ablate, parse_head
from eesd.bench.campaign import Campaign
from eesd.bench.plots import check_plots
from eesd.bench.report import write_report
from eesd.bench.results import Result, load_regret
from eesd.bench.run import Bench, Options
from eesd.bench.tasks import LOADERS, load_tasks
from eesd.runtime.backends import BACKENDS
from eesd.runtime.errors import EESDError, one_line_errors

F = TypeVar("F", bound=Callable[..., Any])

HELP = {"help_option_names": ["-h", "--help"], "show_default": True}
QUICK = {"per_task": 1, "tuning_per_task": 1, "max_new_tokens": 32, "widths": "1"}
"""What ``--quick`` makes of the options that are not given."""
DEFAULT = Options()


def measuring(controllers: Iterable[str], samplings: Iterable[str]) -> Callable[[F], F]:
    """The options that all measurements share, with these defaults."""
    options = [
        click.option("--task", "tasks", multiple=True, metavar="NAME=FILE", help=f"Prompts; NAME: {', '.join(LOADERS)}."),
        click.option("--controllers", default=" ".join(controllers), help="Separated by spaces; fixed, threshold: tuned."),
        click.option("--tree-widths", "widths", default=" ".join(map(str, DEFAULT.widths)), help="1 drafts a chain."),
        click.option("--budgeted", default="", help="Tree widths to measure with a tree budget, too."),
        click.option("--samplings", default=" ".join(samplings), help="Separated by spaces."),
        click.option("--temperature", default=DEFAULT.temperature, help="Of the samplings that are not greedy."),
        click.option("-n", "--max-new-tokens", default=DEFAULT.max_new_tokens),
        click.option("--per-task", default=DEFAULT.per_task, help="Prompts of each task to report, at most."),
        click.option("--tuning-per-task", default=DEFAULT.tuning_per_task, help="Other prompts of each task to tune on."),
        click.option("--guard/--no-guard", default=DEFAULT.guard, help="Rest drafting where it does not pay."),
        click.option("--chat", is_flag=True, help="Give prompts as chat messages."),
        click.option("--seed", default=DEFAULT.seed),
        click.option("--backend", type=click.Choice(BACKENDS), default=DEFAULT.backend),
        click.option("--threads", type=int, help="CPU threads of an engine.  [default: the processors of this process]"),
        click.option("--quick", is_flag=True, help="About a minute: few prompts, few tokens, chains."),
        click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("bench-results"), help="Directory."),
        click.option("--resume", is_flag=True, help="Go on with an interrupted measurement in --output."),
        click.option("--overwrite", is_flag=True, help="Replace the measurement in --output."),
        click.option("--plots/--no-plots", default=True, help="Draw the plots, too (needs matplotlib)."),
    ]

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


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
def kept(campaign: Campaign, plots: bool) -> Iterator[None]:
    """Finish the campaign and write its report; on Ctrl-C say what is left of it."""
    try:
        yield
    except KeyboardInterrupt:
        if campaign.path.exists():
            click.echo(f"\n{campaign.path} has what was measured; go on with --resume.", err=True)
        raise
    campaign.finish()
    report = campaign.path.with_name("report.md")
    write_report([campaign.result], [], report, plots)
    click.echo(report.read_text("utf-8"))
    click.echo(f"{campaign.path}, {report}", err=True)


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


@main.command(context_settings=HELP)
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("docs/results.md"), help="Markdown to write.")
@click.option("--plots/--no-plots", default=True, help="Draw the plots, too (needs matplotlib).")
@one_line_errors
def report(results: tuple[Path, ...], output: Path, plots: bool) -> None:
    """Make Markdown and plots of RESULTS: result.json files, and JSON with regret curves."""
    check_plots(plots)
    curves, found = [], []
    for path in results:
        regret = load_regret(path)
        curves += [regret] if regret else []
        found += [] if regret else [Result.load(path)]
    write_report(found, curves, output, plots)
    click.echo(output)


if __name__ == "__main__":
    main()
