"""Where the verify graph is cut into stages, for models that do not fit one device."""

from itertools import pairwise
from math import prod

from eesd.export.graph import EMBEDDINGS, ExportOptions
from eesd.export.manifest import BITS, linear_bytes
from eesd.model.checkpoint import Checkpoint
from eesd.model.exit_head import ExitConfig
from eesd.runtime.errors import EESDError


def split_layers(checkpoint: Checkpoint, exit_config: ExitConfig, options: ExportOptions) -> list[range]:
    """The layers of each stage, so that the fullest device has as few bytes of weights as can be.

    The first stage has at least the N layers before the exit: its device also runs the draft, on the same caches.
    """
    layers, before_exit, stages = checkpoint.config.num_layers, exit_config.layer, options.stages
    most = layers - before_exit + 1
    if not 1 <= stages <= most:
        raise EESDError(
            f"--stages must be between 1 and {most} for this {layers}-layer model with its exit after layer {before_exit} "
            f"(the first stage holds what the draft uses); {stages} was given."
        )
    layer, first, last = _sizes(checkpoint, exit_config, options)
    counts = [before_exit] + [1] * (stages - 1)
    besides = [first] + [0] * (stages - 1)
    besides[-1] += last
    for _ in range(layers - sum(counts)):  # layers are of one size: each to the emptiest device is the best split
        counts[min(range(stages), key=lambda stage: besides[stage] + counts[stage] * layer)] += 1
    borders = [sum(counts[:stage]) for stage in range(stages + 1)]
    return [range(*pair) for pair in pairwise(borders)]


def _sizes(checkpoint: Checkpoint, exit_config: ExitConfig, options: ExportOptions) -> tuple[int, int, int]:
    """Bytes of one layer, and of what the first and the last device hold besides layers, as they will be stored."""
    size = {name: _stored_bytes(name, tensor.shape, options) for name, tensor in checkpoint.tensors.items()}
    layer = sum(nbytes for name, nbytes in size.items() if name.startswith("model.layers.0."))
    table = size[EMBEDDINGS]
    lm_head = 0 if checkpoint.config.tied_embeddings else size["lm_head.weight"]
    # The draft's device needs an LM head too: the base model's, or the exit head's own of the same size.
    own = _stored_bytes("exit_head.lm_head.weight", checkpoint.tensors[EMBEDDINGS].shape, options) * exit_config.own_lm_head
    first = table + max(lm_head, own) + exit_config.blocks * layer
    return layer, first, lm_head or table


def _stored_bytes(name: str, shape: tuple[int, ...], options: ExportOptions) -> int:
    if len(shape) < 2 or name == EMBEDDINGS:
        return prod(shape) * BITS[options.dtype] // 8
    return linear_bytes(shape[1], shape[0], options.dtype, options.quantization)
