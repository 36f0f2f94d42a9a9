"""``eesd-export``: export a model to an engine directory."""

from pathlib import Path
from typing import Any

import click

from eesd.common.cli import NAME, OUTPUT, PATH, command
from eesd.common.manifest import (
    DEFAULT_SLOTS,
    DEFAULT_TOP_K,
    DEFAULT_TREE_NODES,
    MAX_SLOTS,
    MAX_TOP_K,
    MAX_TREE_NODES,
)
from eesd.common.quantization import DTYPES
from eesd.export.make import KEEP, QUANTIZED_OR_NONE, Choices, make_engines


@command()
@click.option(
    "--model",
    type=NAME,
    required=True,
    help="Model directory, GGUF file, Hugging Face id, or short name such as llama-70b.",
)
@click.option(
    "--exit-layer",
    type=click.IntRange(1, 10_000),
    help="Number of layers before the exit head (N).  [default: as the exit head was trained]",
)
@click.option(
    "--exit-head",
    type=NAME,
    help=(
        "Source of drafts: the directory or Hugging Face id of a trained exit head or of a "
        "published EAGLE-3 head; quantized (the whole model in fewer bits, without "
        "training); own (the model's norm and LM head, for models trained to exit early); or "
        "none (only repeated text drafts).  [default: the head in the model directory; own "
        "with --exit-layer if the model's name contains LayerSkip; quantized for weights of "
        "8 bits or more; else none]"
    ),
)
@click.option(
    "-o", "--output", type=OUTPUT, default=Path("plans"), help="Engine directory to write."
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Element type of the engines.  [default: the checkpoint's]",
)
@click.option(
    "--quantize",
    type=click.Choice((*QUANTIZED_OR_NONE, KEEP)),
    help=(
        "Format to which the linear weights of the layers are quantized. keep uses the "
        "quantized values of a GGUF file as they are. fp8 needs a GPU of compute capability "
        "8.9 or newer, and nvfp4 one of 10.0.  [default: keep for float32 engines of a "
        "quantized GGUF file, else none]"
    ),
)
@click.option(
    "--quantize-head",
    type=click.Choice(QUANTIZED_OR_NONE),
    help="Format of the LM head, as for --quantize.  [default: as --quantize]",
)
@click.option(
    "--quantize-draft",
    type=click.Choice(QUANTIZED_OR_NONE),
    help=(
        "Format of the weights that only the draft uses. It never changes the output.  "
        "[default: int4 for float32 engines and for models above 1 B weights, else as "
        "--quantize]"
    ),
)
@click.option(
    "--symmetric/--asymmetric",
    default=None,
    help=(
        "Whether 4-bit weights have no minimums. Minimums are more accurate, but TensorRT "
        "does not support them.  [default: symmetric for 16-bit engines]"
    ),
)
@click.option(
    "--round-on",
    type=PATH,
    help=(
        "Text file that resembles your users' texts. 4-bit weights are then rounded jointly "
        "(GPTQ), so that the outputs of the layers change little on this text. This takes "
        "minutes.  [default: round each weight to nearest]"
    ),
)
@click.option(
    "--layers",
    type=click.IntRange(2, 10_000),
    help="Export only this number of layers, the first of the model, as a trial.",
)
@click.option(
    "--max-seq-len",
    type=click.IntRange(2, MAX_SLOTS),
    help=(
        "Number of slots in the KV cache (S).  [default: the model's maximum length, up to "
        f"{DEFAULT_SLOTS}]"
    ),
)
@click.option(
    "--max-tree-nodes",
    type=click.IntRange(1, MAX_TREE_NODES),
    default=DEFAULT_TREE_NODES,
    help="Maximum number of drafted tokens in a round (M).",
)
@click.option(
    "--draft-top-k",
    type=click.IntRange(1, MAX_TOP_K),
    default=DEFAULT_TOP_K,
    help="Number of candidates that the draft returns per token (K).",
)
@click.option(
    "--stages",
    type=click.IntRange(1, 1000),
    default=1,
    help="Number of devices over which to split the layers of verify.",
)
@click.option(
    "--link-weights",
    is_flag=True,
    help="Hard-link the checkpoint's files instead of copying the weights.",
)
@click.option(
    "--check/--no-check",
    default=None,
    help=(
        "Compare the whole graphs with torch, or skip all checks.  [default: check two "
        "layers and the head with ONNX Runtime]"
    ),
)
@click.option(
    "--pack/--no-pack",
    default=None,
    help=(
        "Also pack the weights for the CPU, as eesd-build --target cpu does.  [default: if "
        "there is no GPU, and enough memory]"
    ),
)
def main(output: Path, **options: Any) -> None:
    """Export a model and its exit head to an engine directory, which has draft and verify graphs,
    shared weights, a tokenizer and a manifest."""
    make_engines(
        Choices(**options), output, click.echo, lambda step: click.echo(f"{step} ...", err=True)
    )


if __name__ == "__main__":
    main()
