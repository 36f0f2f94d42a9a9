"""``eesd-build``: compile the graphs of an engine directory to TensorRT plans."""

import resource
import shutil
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from eesd.common.cli import clean_up_on_sigterm, one_line_errors
from eesd.common.errors import EESDError
from eesd.common.manifest import FLAVOURS, NAME, PREFILL_CHUNK, GraphInfo, Manifest, PlanInfo, load_manifest, verify_files
from eesd.export.memory import build_memory
from eesd.runtime.doctor import available_memory, compute_capability
from eesd.runtime.engines.backends import open_engines

if TYPE_CHECKING:  # onnx loads only after the options were checked
    from eesd.export.plans import BuildOptions


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--target", type=click.Choice(tuple(FLAVOURS)), help="Flavour to build with.  [default: the one installed]")
@click.option("--precision", help="Refuse to build anything but this element type, such as float16.")
@click.option("--batch", type=click.IntRange(1, 64), default=1, help="Sequences of a call at most.")
@click.option("--prefill-chunk", type=click.IntRange(min=1), help="Tokens of the prompt in a call at most.  [default: 128]")
@click.option("--compute-capability", "capabilities", multiple=True, help="tensorrt-rtx: GPU to build for, such as 8.9.")
@click.option("--force", is_flag=True, help="Build plans that are up to date, too.")
@click.option("--check", is_flag=True, help="Then compare what the plans compute with the graphs. Needs a GPU.")
@one_line_errors
def main(
    directory: Path,
    target: str | None,
    precision: str | None,
    batch: int,
    prefill_chunk: int | None,
    capabilities: tuple[str, ...],
    force: bool,
    check: bool,
) -> None:
    """Build draft.plan and verify.plan from the graphs in DIRECTORY and record them in its manifest."""
    try:
        from eesd.export import plans
    except ImportError as error:
        raise EESDError(f"Building needs {error.name}; install it with: pip install 'eesd[tensorrt-rtx]'.") from None
    clean_up_on_sigterm()  # or a partial plan would be left behind
    manifest = load_manifest(directory)
    plans.check_precision(manifest)
    if precision not in (None, manifest.dtype):
        raise EESDError(
            f"{directory} was exported as {manifest.dtype}; for {precision} plans export with --dtype {precision} first."
        )
    chunk = prefill_chunk or min(PREFILL_CHUNK, manifest.max_seq_len)
    options = plans.BuildOptions(plans.find_flavour(target), batch, chunk, capabilities)
    plans.check_options(manifest, options)
    outdated = [g for g in manifest.graphs if force or not plans.up_to_date(directory, manifest, g, options)]
    if outdated or _touched(directory, manifest):
        verify_files(directory, manifest)
    for graph in manifest.graphs:
        if graph in outdated:
            manifest = _build_plan(directory, manifest, graph, options)
        else:
            click.echo(f"{manifest.plans[graph.file].file}: up to date")
    if check:
        _check(directory, manifest)


def _touched(directory: Path, manifest: Manifest) -> bool:
    """Whether a file was written after the manifest, which an export writes last, and a build when it has verified all."""
    written = (directory / NAME).stat().st_mtime_ns
    return any((directory / name).stat().st_mtime_ns > written for name in manifest.sizes)


def _build_plan(directory: Path, manifest: Manifest, graph: GraphInfo, options: "BuildOptions") -> Manifest:
    """Build one plan, say what it took, and give the manifest that has it."""
    from eesd.export import plans

    estimate = check_room(directory, graph)
    started = time.perf_counter()
    with _progress(Console(stderr=True)) as bar:
        plan = plans.build(directory, manifest, graph, options, partial(_monitor, bar))
    manifest = plans.record(directory, manifest, graph, plan)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    click.echo(
        f"{plan.file}: {plan.size / 1e6:.1f} MB by {plan.flavour} {plan.version} in {time.perf_counter() - started:.1f} s, "
        f"memory {peak / 1e9:.2f} GB at most (estimated {estimate / 1e9:.2f} GB), "
        f"{plan.fused_attentions} fused attentions, {plan.fused_cache_updates} cache updates in place"
    )
    _warn_unfused(manifest, graph, plan)
    return manifest


def _check(directory: Path, manifest: Manifest) -> None:
    """Compare the plans with their graphs, and print the cosines. Without a GPU, or too little memory, say that it is not done."""
    from eesd.export.validate import LEAST_COSINE, memory_needed, validate

    needed = memory_needed(manifest)
    if compute_capability() is None:
        _skip("there is no NVIDIA GPU here; run the same command on a machine that has one")
        return
    if needed > available_memory():
        _skip(f"the reference takes about {needed / 1e9:.0f} GB of memory; try an export with --layers")
        return
    cosines = validate(open_engines(directory, manifest, "tensorrt", None, True), directory, manifest)
    least = LEAST_COSINE[manifest.dtype]
    for what, cosine in cosines.items():
        click.echo(f"{what}: cosine {cosine:.6f} or better (required: {least})")
    if min(cosines.values()) < least:
        raise EESDError("The plans do not compute what their graphs do; please report this model.")


def _skip(reason: str) -> None:
    click.secho(f"The plans were not checked: {reason}.", fg="yellow", err=True)


def check_room(directory: Path, graph: GraphInfo) -> int:
    """Estimate the memory of a build in bytes; :class:`EESDError` where memory or disk are too little for it."""
    from eesd.export import plans

    weights = plans.weight_bytes(directory, graph)
    needed = build_memory(weights)
    available = available_memory() + weights  # the file of weights is mapped, and may leave memory again
    if needed > available:
        raise EESDError(
            f"Building {graph.file} takes about {needed / 1e9:.0f} GB of memory and {available / 1e9:.0f} GB are there; "
            "build on a larger machine, or split the graph with eesd-export --stages."
        )
    size = round(1.05 * weights) + 100_000_000
    free = shutil.disk_usage(directory).free
    if size > free:
        raise EESDError(
            f"The plan of {graph.file} takes about {size / 1e9:.1f} GB and {directory} has {free / 1e9:.1f} GB free; "
            "free some space."
        )
    return needed


def _warn_unfused(manifest: Manifest, graph: GraphInfo, plan: PlanInfo) -> None:
    """Say so when fewer attentions or cache updates than the graph has are single kernels: decoding would be slow."""
    only_written = graph == manifest.verify[0]  # the cache of the last exit block
    attentions, updates = len(graph.caches) - only_written, 2 * len(graph.caches)
    if plan.fused_attentions < attentions or plan.fused_cache_updates < updates:
        click.secho(
            f"{graph.file}: only {plan.fused_attentions} of {attentions} attentions and {plan.fused_cache_updates} of "
            f"{updates} cache updates are single kernels in this build; it will be slow.",
            fg="yellow",
            err=True,
        )


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description:<44.44}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _monitor(bar: Progress, base: Any) -> Any:
    """The builder's phases as bars."""

    class Monitor(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.phases: dict[str, TaskID] = {}

        def phase_start(self, name: str, _parent: str | None, steps: int) -> None:
            self.phases[name] = bar.add_task(name, total=steps)

        def step_complete(self, name: str, step: int) -> bool:
            bar.update(self.phases[name], completed=step)
            return True

        def phase_finish(self, name: str) -> None:
            bar.remove_task(self.phases.pop(name))

    return Monitor()


if __name__ == "__main__":
    main()
