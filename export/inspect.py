"""``eesd-inspect``: what is in an engine directory."""

import json
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eesd.common.cli import one_line_errors
from eesd.common.errors import EESDError
from eesd.common.manifest import Manifest, check_plan, load_manifest, verify_files
from eesd.export import memory


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Hash every file again and compare with the manifest.")
@click.option("--tensors", is_flag=True, help="List the inputs and outputs of the graphs.")
@click.option("--layers", is_flag=True, help="List the layers of the plans instead; needs the GPU that they are for.")
@click.option("--memory", "memory_only", is_flag=True, help="Show what running it takes instead, device by device.")
@click.option("--max-seq-len", type=click.IntRange(min=2), help="Plan for an export with so many slots.")
@click.option("--batch", type=click.IntRange(min=1), help="Plan for so many sequences at once.  [default: 1]")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest, or the plan, as JSON.")
@one_line_errors
def main(
    directory: Path,
    verify: bool,
    tensors: bool,
    layers: bool,
    memory_only: bool,
    max_seq_len: int | None,
    batch: int | None,
    as_json: bool,
) -> None:
    """Show what an engine directory holds; --verify also re-hashes its files."""
    manifest = load_manifest(directory)
    if not memory_only and (max_seq_len or batch):
        raise EESDError("--max-seq-len and --batch change nothing but a memory plan; add --memory.")
    if layers and as_json:
        raise EESDError("--layers has no JSON form; leave out --json.")
    console = Console(markup=False, emoji=False)  # names may hold anything
    if layers:
        _layers(console, directory, manifest)
    elif memory_only:
        _memory(console, manifest, max_seq_len or manifest.max_seq_len, batch or 1, as_json)
    elif as_json:
        click.echo(manifest.to_json(), nl=False)
    else:
        console.print(_summary(directory, manifest))
        console.print(_files(manifest))
        if tensors:
            console.print(_tensors(manifest))
        if manifest.plans:
            console.print(_plans(manifest))
    if verify:
        stderr = Console(stderr=True)
        with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
            task = bar.add_task("hashing", total=sum(manifest.sizes.values()))
            verify_files(directory, manifest, lambda size: bar.advance(task, size))
            for plan in manifest.plans.values():
                check_plan(directory, plan)
        click.echo("all files are as exported", err=as_json)


def _memory(console: Console, manifest: Manifest, slots: int, batch: int, as_json: bool) -> None:
    if slots <= manifest.max_tree_nodes:
        raise EESDError(f"--max-seq-len {slots} has no room for the {manifest.max_tree_nodes} nodes of a round; give more.")
    manifest = replace(manifest, max_seq_len=slots)
    devices = memory.estimate_memory(manifest, batch)
    if as_json:
        click.echo(json.dumps({"slots": slots, "batch": batch, "devices": [device.to_dict() for device in devices]}))
    else:
        console.print(memory.table(manifest, devices, batch))


def _summary(directory: Path, manifest: Manifest) -> Table:
    slot = memory.slot_bytes(manifest, manifest.num_caches)
    trained = "" if manifest.exit_head.trained else "  (untrained: train it with eesd-distill)"
    rows = {
        "model": f"{manifest.model} ({manifest.geometry.architecture})",
        "geometry": (
            f"{manifest.geometry.num_layers} layers of {manifest.geometry.hidden_size}, {manifest.geometry.num_heads} heads and "
            f"{manifest.geometry.num_kv_heads} KV heads of {manifest.geometry.head_dim}, vocabulary {manifest.geometry.vocab_size}"
        ),
        "exit head": f"after layer {manifest.exit_head.layer}, {manifest.exit_head.blocks} block(s){trained}",
        "confidence": "a prior of this head" if manifest.exit_head.calibration else "the default prior",
        "element type": manifest.dtype,
        "linear weights": _linear_weights(manifest),
        "KV cache": (
            f"{manifest.num_caches} caches, {manifest.max_seq_len} slots of {slot / 1024:.1f} KiB, "
            f"{slot * manifest.max_seq_len / 2**20:.0f} MiB when full"
        ),
        "token tree": f"{manifest.max_tree_nodes} nodes a round, {manifest.draft_top_k} candidates a step",
        "made with": ", ".join(f"{name} {value}" for name, value in manifest.tools.items()),
    }
    if len(manifest.verify) > 1:
        rows["stages"] = "\n".join(
            f"{stage.file}: layers {layers.start} to {layers.stop - 1}"
            for stage, layers in zip(manifest.verify, manifest.stage_layers, strict=True)
        )
    table = Table(title=str(directory), show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _linear_weights(manifest: Manifest) -> str:
    quantization = manifest.quantization
    if quantization is None:
        return manifest.dtype
    return f"{quantization.weights}, a scale for every {quantization.block} inputs of an output"


def _files(manifest: Manifest) -> Table:
    table = Table("file", "bytes", "SHA-256")
    for name, info in manifest.files.items():
        table.add_row(name, f"{info.size:,}", info.sha256[:16])
    for name, linked in manifest.linked.items():
        table.add_row(name, f"{linked.size:,}", f"{linked.samples[:16]} of samples: the checkpoint's own file")
    return table


def _plans(manifest: Manifest) -> Table:
    table = Table("plan", "what it is")
    for plan in manifest.plans.values():
        gpus = ", ".join(plan.compute_capabilities)
        (_, _, most), (_, _, chunk) = plan.profiles
        table.add_row(
            plan.file,
            f"{plan.size:,} bytes by {plan.flavour} {plan.version} for "
            f"{f'compute capability {gpus}' if gpus else 'any GPU that it supports'}\n"
            f"up to {most} nodes a call, {chunk} in prefill, batch {plan.max_batch}\n"
            f"{plan.fused_attentions} attentions and {plan.fused_cache_updates} cache updates as single kernels\n"
            f"SHA-256 {plan.sha256[:16]}",
        )
    return table


def _layers(console: Console, directory: Path, manifest: Manifest) -> None:
    """A table for each plan, and how many of its layers are attentions or cache updates by their names."""
    from eesd.runtime.engines.trt_plans import Plans

    plans = Plans(directory, manifest)
    for graph in manifest.graphs:
        found = plans.layers(graph)
        words = [f"{name} {kind}".lower().replace("_", "") for name, kind in found]
        attentions = sum("attention" in word or "mha" in word for word in words)
        updates = sum("kvcache" in word for word in words)
        plan = manifest.plans[graph.file].file
        console.print(f"{plan}: {len(found)} layers, {attentions} attentions, {updates} cache updates", soft_wrap=True)
        table = Table("layer", "kind")
        for row in found:
            table.add_row(*row)
        console.print(table)


def _tensors(manifest: Manifest) -> Table:
    table = Table("graph", "", "tensor", "shape", "type")
    for graph in manifest.graphs:
        for way, infos in (("in", graph.inputs), ("out", graph.outputs)):
            for info in infos:
                table.add_row(graph.file, way, info.name, str(list(info.shape)), info.dtype)
    return table


if __name__ == "__main__":
    main()
