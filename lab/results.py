"""Write docs/results.md from the files in ``bench/results/``, which all benchmarks and tools wrote.

python -m lab.results bench/results -o docs/results.md
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from eesd.bench.measure.results import Result, read_json
from eesd.bench.replay.simulation import Simulation
from eesd.bench.report.markdown import write_report
from eesd.common import cli
from lab import exactness, spec_bench_table
from lab.peers import batches, passes, table
from lab.peers.results import Result as Peers


def section(path: Path, raw: Any) -> Callable[[bool], list[str]] | None:
    """Return a function that makes the lines of a tool's file, or None for a file of
    ``eesd-bench``. The function's argument says whether to show the published systems."""
    if Peers.wrote(raw):
        return lambda _: table.markdown(Peers.load(path), "##")
    if passes.Passes.wrote(raw):
        return lambda _: passes.markdown(passes.Passes.load(path), "##")
    if spec_bench_table.Result.wrote(raw):
        return lambda last: spec_bench_table.markdown(
            spec_bench_table.Result.load(path), "##", published=last
        )
    if batches.is_batches(raw):
        return lambda _: batches.markdown(raw, "##")
    return (lambda _: exactness.markdown(raw, "##")) if exactness.is_exactness(raw) else None


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.json"), key=lambda path: path.stem)


@cli.command()
@click.argument("results", nargs=-1, required=True, type=cli.PATH)
@click.option(
    "-o", "--output", type=cli.OUTPUT, default=Path("docs/results.md"), help="Markdown to write."
)
def main(results: tuple[Path, ...], output: Path) -> None:
    """Write Markdown from RESULTS. These are files that eesd-bench and the tools wrote, or
    directories with such files."""
    paths = [path for given in results for path in (_files(given) if given.is_dir() else [given])]
    files = {path: read_json(path) for path in paths}
    sections = {path: found for path, raw in files.items() if (found := section(path, raw))}
    last = [*sections][-1] if sections else None
    first = [line for path, lines in sections.items() for line in lines(path == last)]
    others = [path for path in files if path not in sections]
    simulations = [path for path in others if Simulation.wrote(files[path])]
    measured = [Result.load(path) for path in others if path not in simulations]
    measured.sort(key=lambda result: result.kind, reverse=True)
    write_report(measured, [Simulation.load(path) for path in simulations], output, first)
    click.echo(output)


if __name__ == "__main__":
    main()
