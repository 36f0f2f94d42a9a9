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
    help="Model directory, GGUF file, Hugging Face id, or name such as llama-70b.",
)
@click.option(
    "--exit-layer",
    type=click.IntRange(1, 10_000),
    help="Number of layers before the exit head (N).  [default: from the exit head]",
)
@click.option(
    "--exit-head",
    type=NAME,
    help="Source of drafts. A trained exit head or a published EAGLE-3 head: its directory or "
    "Hugging Face id. quantized: the whole model in fewer bits, without training. own: the "
    "model's norm and LM head, for models trained to exit early. none: only repeated text.  "
    "[default: the head in the model directory; own with --exit-layer if the model's name "
    "says LayerSkip; quantized for weights of 8 bits or more; else none]",
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
    help="Quantize the linear weights of the layers to 8 or 4 bits, or keep the file's own levels. "
    "fp8 is for GPUs of compute "
    "capability 8.9 or newer, nvfp4 for 10.0.  [default: keep for float32 engines of a "
    "quantized GGUF file, else none]",
)
@click.option(
    "--quantize-head",
    type=click.Choice(QUANTIZED_OR_NONE),
    help="The same for the LM head.  [default: as --quantize]",
)
@click.option(
    "--quantize-draft",
    type=click.Choice(QUANTIZED_OR_NONE),
    help="The same for weights that only the draft uses; it never changes the output.  "
    "[default: int4 for float32 engines and above 1 B weights, else as --quantize]",
)
@click.option(
    "--symmetric/--asymmetric",
    default=None,
    help=(
        "4 bits without or with minimums. Minimums are more accurate, but TensorRT has none.  "
        "[default: symmetric for 16-bit engines]"
    ),
)
@click.option(
    "--round-on",
    type=PATH,
    help="Text file like your users' texts. Weights of 4 bits are then rounded together, so that "
    "the outputs of layers "
    "change little on it (GPTQ). This takes minutes.  [default: round each weight to nearest]",
)
@click.option(
    "--layers",
    type=click.IntRange(2, 10_000),
    help="Export only the first layers of the model, as a trial.",
)
@click.option(
    "--max-seq-len",
    type=click.IntRange(2, MAX_SLOTS),
    help=f"Slots of the KV cache (S).  [default: the model's positions, at most {DEFAULT_SLOTS}]",
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
    help="Candidates that the draft returns per token (K).",
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
        "Compare the whole graphs with torch, or check nothing.  [default: check two layers and "
        "the head with ONNX Runtime]"
    ),
)
@click.option(
    "--pack/--no-pack",
    default=None,
    help=(
        "Also build for the CPU, as eesd-build --target cpu does.  [default: if there is no GPU, "
        "and memory allows]"
    ),
)
def main(output: Path, **options: Any) -> None:
    """Export a model and its exit head to an engine directory: draft and verify graphs, shared
    weights, tokenizer, manifest."""
    make_engines(
        Choices(**options), output, click.echo, lambda step: click.echo(f"{step} ...", err=True)
    )


if __name__ == "__main__":
    main()
