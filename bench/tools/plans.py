"""Build plans in several forms and list what they are: CPU time, memory, size, and the kernels of their attention.

python -m eesd.bench.tools.plans --model MODEL --forms "float16 bfloat16 float16/int8" -o plans.jsonl

A form is an element type, and after a slash a quantization. TensorRT-RTX builds without a GPU, and its log names the kernels.
"""

import json
import logging
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click

from eesd.bench.tools.shapes import SHAPES, run_command, write_checkpoint
from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.manifest_reader import load_manifest
from eesd.common.markdown import table
from eesd.common.outputs import scratch_directory
from eesd.export import plans
from eesd.runtime.engines.trt_flavours import capabilities_for
from eesd.runtime.engines.trt_plans import LOGGER

CACHE = 4096
"""Slots of the KV cache."""


@dataclass(frozen=True)
class Row:
    """A plan, or why there is none.

    Attributes:
        model: Name of the model.
        form: Element type, and quantization.
        parts: Whether attention might be built from parts; the builder takes a kernel where it has one.
        plan: Its file.
        version: Of the builder.
        refused: Why it was not built.
        weights: Bytes of the weights that the graph reads.
        size: Bytes of the plan.
        seconds: CPU time of the build.
        peak: Most bytes of memory of the process that built it, the mapped file of weights included.
        kernels: Kernels of the plan that are a whole attention, of all profiles.
        profiles: Number of profiles.
        updates: Cache updates in place.
    """

    model: str
    form: str
    parts: bool
    plan: str = ""
    version: str = ""
    refused: str = ""
    weights: int = 0
    size: int = 0
    seconds: float = 0.0
    peak: int = 0
    kernels: int = 0
    profiles: int = 0
    updates: int = 0


class _Kernels(logging.Handler):
    """Counts the kernels of attention in the builder's list of layers."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Layers:"):
            self.count = sum("_mha_" in line.partition(", LayerType")[0] for line in text.splitlines())


def build_one(directory: Path, number: int, row: Row) -> Row:
    """Build the plan of a graph, in a process of its own."""
    kernels = _Kernels()
    LOGGER.addHandler(kernels)
    LOGGER.setLevel(logging.DEBUG)
    manifest, flavour = load_manifest(directory), plans.find_flavour(None)
    graph = manifest.graphs[number]
    options = plans.BuildOptions(flavour, 1, manifest.gpu_prefill_chunk, capabilities_for(flavour, manifest))
    started = time.process_time()
    try:
        plans.check_precision(manifest)
        plans.check_options(manifest, options)
        plan = plans.build(directory, manifest, graph, options, lambda _: None, (False,) if row.parts else (True, False))
    except EESDError as error:
        return Row(row.model, row.form, row.parts, graph.file, refused=str(error))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Row(
        row.model,
        row.form,
        row.parts or not plan.fused_attentions,
        plan.file,
        plan.version,
        weights=manifest.weight_bytes(graph),
        size=plan.size,
        seconds=round(time.process_time() - started, 1),
        peak=int(status["VmHWM"].split()[0]) * 1024,
        kernels=kernels.count,
        profiles=len(plan.profiles),
        updates=plan.fused_cache_updates,
    )


def build_form(model: Path | str, row: Row, options: tuple[object, ...], work: Path) -> list[Row]:
    """Export a model in a form, and build its plans."""
    dtype, _, kind = row.form.partition("/")
    directory = work / row.form.replace("/", "-")
    quantize = ("--quantize", kind) if kind else ()
    try:
        run_command("eesd.export.cli", "--model", model, "--dtype", dtype, *quantize, *options, "--no-check", "-o", directory)
    except EESDError as error:
        return [Row(row.model, row.form, row.parts, refused=str(error))]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as alone:
        each = partial(build_one, directory, row=row)
        return list(alone.map(each, range(len(load_manifest(directory).graphs))))


def markdown(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    columns = ("model", "form", "plan", "weights", "size", "CPU time", "peak memory", "attention kernels", "updates in place")
    return "\n".join(table(columns, map(_cells, rows)))


def _cells(row: Row) -> list[object]:
    form = row.form.replace("/", ", ") + (", parts allowed" if row.parts else "")
    if row.refused:
        return [row.model, form, row.plan, row.refused, *[""] * 5]
    megabytes = [f"{size / 1e6:,.0f} MB" for size in (row.weights, row.size)]
    return [row.model, form, row.plan, *megabytes, f"{row.seconds:.0f} s", f"{row.peak / 1e9:.1f} GB", row.kernels, row.updates]


@cli.command()
@click.option("--model", type=cli.NAME, help="As in eesd-export.")
@click.option("--shape", type=click.Choice(list(SHAPES)), help="A Llama of this shape with random weights, instead of a model.")
@click.option("--layers", type=click.IntRange(2, 1000), help="Layers of the shape.  [default: all]")
@click.option("--exit-head", type=cli.PATH, help="As in eesd-export.")
@click.option("--exit-layer", type=click.IntRange(min=1), help="As in eesd-export.  [default: 1 for a shape]")
@click.option("--name", help="Name of the model in the table.  [default: that of its file or shape]")
@click.option("--forms", default="float16", help="Element types, each with a quantization or without, separated by spaces.")
@click.option("--parts", is_flag=True, help="Let attention be built from parts, as where there is no kernel for it.")
@click.option("-o", "--output", type=cli.OUTPUT, required=True, help="JSON lines, which are added to.")
def main(
    model: str | None, shape: str | None, layers: int | None, exit_head: Path | None, exit_layer: int | None, name: str | None,
    forms: str, parts: bool, output: Path,
) -> None:  # fmt: skip
    """Build plans in several forms, and print what FILE then lists."""
    if (model is None) == (shape is None):
        raise EESDError("Give either --model or --shape.")
    options: tuple[Any, ...] = ("--max-seq-len", CACHE) if shape else ()
    layer = exit_layer or (1 if shape and not exit_head else None)
    options += (("--exit-head", exit_head) if exit_head else ()) + (("--exit-layer", layer) if layer else ())
    with scratch_directory("eesd-plans") as work:
        source: Path | str = model or work / "checkpoint"
        if shape:
            write_checkpoint(work / "checkpoint", shape, layers)
        for form in forms.split():
            found = build_form(source, Row(name or shape or Path(str(model)).name, form, parts), options, work)
            with output.open("a") as file:
                file.writelines(json.dumps(asdict(row)) + "\n" for row in found)
    click.echo(markdown([Row(**json.loads(line)) for line in output.read_text().splitlines()]))


if __name__ == "__main__":
    main()
