"""``eesd-export``: split a model into draft and verify."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from eesd.common.cli import clean_up_on_sigterm, one_line_errors
from eesd.common.errors import EESDError
from eesd.common.manifest import SLOTS, TOP_K, TREE_NODES
from eesd.common.weights import BLOCK, DTYPES, QUANTIZED, is_linear
from eesd.runtime.doctor import available_memory

if TYPE_CHECKING:  # torch loads only after the options were checked
    from eesd.common.manifest import Manifest
    from eesd.export.engine_dir import Head
    from eesd.model.checkpoint import Checkpoint


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", required=True, help="Model directory, Hugging Face id, or short name such as llama-70b.")
@click.option("--exit-layer", type=int, help="Layers before the exit head (N); taken from the exit head when it has one.")
@click.option("--exit-head", type=click.Path(path_type=Path), help="Directory of a trained exit head.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("plans"), help="Engine directory to write.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Element type of the engines.  [default: the checkpoint's]")
@click.option("--quantize", type=click.Choice(QUANTIZED), help="Store linear weights in 8 or 4 bits.")
@click.option("--layers", type=click.IntRange(min=2), help="Export only so many base layers, for a first try.")
@click.option("--max-seq-len", type=click.IntRange(min=2), help=f"Slots of the KV cache (S).  [default: at most {SLOTS}]")
@click.option("--max-tree-nodes", type=click.IntRange(1, 512), default=TREE_NODES, help="Drafted tokens that fit a round (M).")
@click.option("--draft-top-k", type=click.IntRange(1, 64), default=TOP_K, help="Candidates that the draft reports (K).")
@click.option("--stages", type=int, default=1, help="Devices to spread the verify graph over, by layers.")
@click.option("--link-weights", is_flag=True, help="Use the checkpoint's own files by hard links instead of a copy.")
@click.option("--check/--no-check", default=None, help="Compare with the torch module.  [default: if memory allows]")
@one_line_errors
def main(
    model: str,
    exit_layer: int | None,
    exit_head: Path | None,
    output: Path,
    dtype: str | None,
    quantize: str | None,
    layers: int | None,
    max_seq_len: int | None,
    max_tree_nodes: int,
    draft_top_k: int,
    stages: int,
    link_weights: bool,
    check: bool | None,
) -> None:
    """Write draft.onnx, verify.onnx (or its stages), their shared weights, tokenizer and manifest.json into one directory."""
    try:
        import onnxscript  # noqa: F401

        from eesd.common.manifest import WEIGHTS
        from eesd.export.engine_dir import check_output, export
        from eesd.export.graph import ExportOptions
        from eesd.model.checkpoint import Checkpoint
        from eesd.model.hub import find_model
    except ImportError as error:
        raise EESDError(f"Exporting needs {error.name}; install it with: pip install 'eesd[export]'.") from None
    clean_up_on_sigterm()  # or whoever stops an export would leave half a model behind

    check_output(output)
    checkpoint = Checkpoint(find_model(model))
    if layers is not None:
        checkpoint = checkpoint.first_layers(layers)
    config = checkpoint.config
    head = _choose_head(checkpoint, exit_layer, exit_head)
    slots = max_seq_len or min(config.max_positions, SLOTS)
    if slots > config.max_positions:
        raise EESDError(f"--max-seq-len {slots} is more than the model's {config.max_positions} positions.")
    if quantize is not None and link_weights:
        raise EESDError("--link-weights leaves weights as they are and --quantize changes them; give one of the two.")
    options = ExportOptions(
        dtype or config.dtype,
        slots,
        max_tree_nodes,
        min(draft_top_k, config.geometry.vocab_size),
        stages,
        link_weights,
        quantize,
    )
    if options.dtype not in DTYPES:
        raise EESDError(f"The checkpoint's type {options.dtype} cannot be exported; give --dtype {'|'.join(DTYPES)}.")
    kept = [] if quantize is None else _unquantized(checkpoint)
    if max_tree_nodes >= slots:
        raise EESDError(f"--max-tree-nodes {max_tree_nodes} does not fit a cache of {slots} slots.")
    with _progress() as bar:
        task = bar.add_task("", total=None)
        lines: list[str] = []
        manifest = export(
            checkpoint,
            head,
            options,
            output,
            lambda stage: bar.update(task, description=stage),
            lambda name, size, total: bar.update(task, description=name, advance=size, total=total),
            lambda directory, manifest: lines.extend(_check(directory, manifest, checkpoint, head, check)),
        )
    kinds = options.dtype if quantize is None else f"{options.dtype} with {quantize} weights"
    click.echo(f"{output}: {config.geometry.architecture}, {kinds}, exit after layer {head.config.layer}, {slots} slots")
    if kept:
        widths = " and ".join(map(str, kept))
        click.echo(f"weights with {widths} inputs stay {options.dtype}: no multiple of 32")
    if link_weights:
        linked = sum(info.size for info in manifest.linked.values())
        click.echo(f"weights: {linked / 1e9:.2f} GB linked, {manifest.files[WEIGHTS].size / 1e9:.2f} GB copied")
    for line in lines:
        click.echo(line)
    if not head.config.trained:
        notice = "No trained exit head: acceptance will be low until one is trained with eesd-distill."
        click.secho(notice, fg="yellow", err=True)


def _unquantized(checkpoint: Checkpoint) -> list[int]:
    """The numbers of inputs whose linear weights cannot be quantized; refused when that is all of them."""
    widths = sorted({tensor.shape[1] for name, tensor in checkpoint.tensors.items() if is_linear(name)})
    kept = [inputs for inputs in widths if inputs % BLOCK]
    if kept == widths:
        raise EESDError(
            f"--quantize takes weights whose inputs are a multiple of {BLOCK}; this model's have {', '.join(map(str, kept))}: "
            "leave the option out."
        )
    return kept


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:<44.44}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _choose_head(checkpoint: Checkpoint, exit_layer: int | None, directory: Path | None) -> Head:
    """The head given, else the one in the model directory, else an untrained one."""
    from eesd.export.engine_dir import stored_head, untrained_head
    from eesd.model.exit_head import CONFIG

    if directory is None and (checkpoint.directory / CONFIG).exists():
        directory = checkpoint.directory
    if directory is not None:
        head = stored_head(checkpoint, directory)
        if exit_layer not in (None, head.config.layer):
            raise EESDError(
                f"The exit head in {directory} leaves after layer {head.config.layer}, --exit-layer says {exit_layer}; "
                "leave the option out or give another --exit-head."
            )
        return head
    if exit_layer is None:
        raise EESDError("There is no trained exit head in the model directory; give --exit-layer N or --exit-head DIR.")
    return untrained_head(checkpoint, exit_layer)


def _check(directory: Path, manifest: Manifest, checkpoint: Checkpoint, head: Head, wanted: bool | None) -> list[str]:
    """What the parity check found, a line for each graph; an error when a graph is wrong."""
    from eesd.export.check import check_engine, memory_needed, quantization_drift

    needed = memory_needed(manifest)
    if wanted is False:
        return []
    if wanted is None and needed > available_memory() // 4:
        return [f"parity not checked: it would take {needed / 1e9:.0f} GB of memory; --check does it all the same"]
    differences = check_engine(directory, manifest, checkpoint, head)
    bad = [kind for kind, difference in differences.items() if not difference.acceptable]
    if bad:
        raise EESDError(f"The {' and '.join(bad)} graph does not compute what the model does; please report this model.")
    lines = [
        f"{kind}: largest difference to torch {difference.largest:.2e} (largest logit {difference.scale:.1f})"
        for kind, difference in differences.items()
    ]
    if manifest.quantization is not None:
        drift = quantization_drift(manifest, checkpoint, head)
        lines.append(
            f"{manifest.quantization.weights}: logits move by {drift.moved:.1%} of their spread; the likeliest token is the "
            f"unquantized model's at {drift.same} of {drift.places} places of a text of its own"
        )
    return lines


if __name__ == "__main__":
    main()
