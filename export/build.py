"""Implements ``eesd-build``, which builds TensorRT plans, or packed weights for the CPU, from the
graphs of an engine directory."""

import resource
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from eesd.common.cli import OUTPUT, command
from eesd.common.errors import EESDError
from eesd.common.files import remove_leftovers
from eesd.common.integrity import files_changed, verify_files
from eesd.common.machine import available_memory
from eesd.common.machine_report import compute_capability
from eesd.common.manifest import GraphInfo, Manifest, PlanInfo, load_manifest
from eesd.common.terminal import Progress, notice, progress
from eesd.common.weights import needs_of, weight_bytes
from eesd.export import plans
from eesd.export.make import lacks
from eesd.export.memory import build_memory
from eesd.runtime.engines.backends import EngineOptions, open_engines
from eesd.runtime.engines.cpu_build import describe_build
from eesd.runtime.engines.trt_plans import FLAVOURS, capabilities_for

CPU = "cpu"
FLOAT16 = (
    "Other projects report wrong results of TensorRT's attention in float16 after about 1,000 "
    "tokens; export with --dtype "
    "bfloat16, or add --check on the GPU."
)


@command()
@click.argument("directory", type=OUTPUT)
@click.option(
    "--target",
    type=click.Choice((*FLAVOURS, CPU)),
    help="TensorRT flavour to build plans for, or cpu.  [default: the installed flavour]",
)
@click.option(
    "--precision", help="Fail unless the engines have this element type, such as float16."
)
@click.option(
    "--batch",
    type=click.IntRange(1, 64),
    default=1,
    help="Maximum number of sequences that decode in one call.",
)
@click.option(
    "--prefill-chunk",
    type=click.IntRange(1, 2**31 - 1),
    help="Maximum number of prompt tokens in a call.  [default: 512]",
)
@click.option(
    "--compute-capability",
    "capabilities",
    multiple=True,
    help=("With tensorrt-rtx, compute capability of a GPU to build for, such as 8.9; repeatable."),
)
@click.option(
    "--strip-weights",
    is_flag=True,
    help="Leave the weights out of the plans, and load them from DIRECTORY. Needs a GPU.",
)
@click.option("--force", is_flag=True, help="Rebuild plans even if they are up to date.")
@click.option(
    "--check",
    is_flag=True,
    help=(
        "Run the plans after the build, and compare them with torch and with their graphs. "
        "Needs a GPU."
    ),
)
def main(
    directory: Path,
    target: str | None,
    precision: str | None,
    batch: int,
    prefill_chunk: int | None,
    capabilities: tuple[str, ...],
    strip_weights: bool,
    force: bool,
    check: bool,
) -> None:
    """Build a plan from each graph in DIRECTORY, and record the plans in its manifest. For the CPU,
    pack the weights."""
    manifest = load_manifest(directory)
    remove_leftovers(directory)
    if target == CPU:
        if precision or batch > 1 or prefill_chunk or capabilities or strip_weights or check:
            raise EESDError("--target cpu takes no option but --force; leave the others out.")
        try:
            from eesd.export.cpu.build import build_for_cpu
        except ImportError as error:
            raise lacks("Building", error) from None
        click.echo(
            f"built for the CPU: {describe_build(build_for_cpu(directory, manifest, force))}"
        )
        return
    plans.check_precision(manifest)
    if precision not in (None, manifest.dtype):
        raise EESDError(
            f"{directory} was exported as {manifest.dtype}; for {precision} plans export with "
            f"--dtype {precision} first."
        )
    chunk = prefill_chunk or manifest.gpu_prefill_chunk
    flavour = plans.find_flavour(target)
    options = plans.BuildOptions(
        flavour, batch, chunk, capabilities or capabilities_for(flavour, manifest), strip_weights
    )
    plans.check_options(manifest, options)
    outdated = [
        g for g in manifest.graphs if force or not plans.up_to_date(directory, manifest, g, options)
    ]
    if outdated or files_changed(directory, manifest):
        verify_files(directory, manifest)
    for graph in manifest.graphs:
        if graph in outdated:
            manifest = _build_plan(directory, manifest, graph, options)
        else:
            click.echo(f"{manifest.plans[graph.file].file}: up to date")
    if check:
        _check(directory, manifest)
    elif manifest.dtype == "float16":
        notice(FLOAT16)


def _build_plan(
    directory: Path, manifest: Manifest, graph: GraphInfo, options: plans.BuildOptions
) -> Manifest:
    """Build one plan, and report its time and memory. Returns the manifest that records the
    plan."""
    estimate = check_resources(directory, manifest, graph, options)
    started = time.perf_counter()
    with progress() as bar:
        plan = plans.build(directory, manifest, graph, options, partial(_monitor, bar))
    manifest = plans.record(directory, manifest, graph, plan)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    click.echo(
        f"{plan.file}: {plan.size / 1e6:.1f} MB by {plan.flavour} {plan.version} in "
        f"{time.perf_counter() - started:.1f} s, "
        f"peak memory {peak / 1e9:.2f} GB (estimated {estimate / 1e9:.2f} GB), "
        f"{plan.fused_attentions} fused attentions, {plan.fused_cache_updates} cache updates "
        "in place"
    )
    _warn_unfused(manifest, graph, plan)
    return manifest


def check_resources(
    directory: Path, manifest: Manifest, graph: GraphInfo, options: plans.BuildOptions
) -> int:
    """Check that memory and disk suffice to build a plan.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        graph: Graph to build the plan from.
        options: Options of the build.

    Returns:
        The estimated memory in bytes.

    Raises:
        EESDError: There is too little memory or disk space.
    """
    weights = weight_bytes(manifest, graph)
    needed = build_memory(weights)
    # The estimate includes the mapped file of weights, which can be evicted.
    available = available_memory() + weights
    if needed > available:
        raise EESDError(
            f"Building {graph.file} needs about {needed / 1e9:.0f} GB of memory, and "
            f"{available / 1e9:.0f} GB are available; "
            "build on a larger machine, or split the graph with eesd-export --stages."
        )
    size = 100_000_000
    if not options.strip_weights:
        size += round(1.05 * weights)
    free = shutil.disk_usage(directory).free
    if size > free:
        raise EESDError(
            f"The plan of {graph.file} needs about {size / 1e9:.1f} GB, and {directory} has "
            f"{free / 1e9:.1f} GB free; "
            "free some space."
        )
    return needed


def _check(directory: Path, manifest: Manifest) -> None:
    """Compare the plans with the torch backend on the same GPU and with their graphs, and print
    the cosines. If there is no GPU or not enough memory, only a notice is printed."""
    try:
        from eesd.export.parity import (
            LEAST_COSINE,
            compare_engines,
            compare_engines_memory,
            compare_texts,
        )
    except ImportError as error:
        raise lacks("--check", error) from None
    if compute_capability() is None:
        notice(
            "The plans were not checked: there is no NVIDIA GPU here; run the same command on "
            "a machine with one."
        )
        return
    engines, by_torch = (
        open_engines(
            directory, manifest, EngineOptions(backend, None, manifest.exit_head.can_draft)
        )
        for backend in ("tensorrt", "torch")
    )
    cosines = compare_texts(engines, by_torch, manifest)
    needed = compare_engines_memory(manifest)
    if needed <= available_memory():
        cosines |= compare_engines(engines, directory, manifest)
    else:
        notice(
            "The plans were compared only with torch, because running their graphs takes about "
            f"{needed / 1e9:.0f} GB of memory."
        )
    least = LEAST_COSINE[manifest.dtype]
    for name, cosine in cosines.items():
        click.echo(f"{name}: lowest cosine {cosine:.6f} (required: {least})")
    if wrong := [name for name, cosine in cosines.items() if cosine < least]:
        raise EESDError(
            f"The plans do not compute the same as their graphs ({wrong[0]}); please report "
            "this model."
        )


def _warn_unfused(manifest: Manifest, graph: GraphInfo, plan: PlanInfo) -> None:
    """Warn if some attentions or cache updates of the graph are not single kernels, because
    decoding is slow then."""
    # The first stage writes the cache of the last exit block, but has no attention for it.
    without = graph == manifest.verify[0] and manifest.exit_head.blocks > 0
    attentions = len(needs_of(manifest, graph).attended) - without
    updates = 2 * len(graph.caches)
    if (plan.fused_attentions, plan.fused_cache_updates) < (attentions, updates):
        notice(
            f"{graph.file}: {plan.flavour} has {plan.fused_attentions} of {attentions} "
            f"attentions and {plan.fused_cache_updates} of {updates} cache updates as "
            "single kernels. Attention in several kernels writes all scores to memory, "
            "and is slower the longer the cache is. polygraphy inspect model --show "
            "layers lists the kernels of a plan."
        )


def _monitor(bar: Progress, base: Any) -> Any:
    """A progress monitor that shows each phase as a bar. ``base`` is the builder's class."""

    class Monitor(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.phases: dict[str, Any] = {}

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
