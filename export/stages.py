"""Where the verify graph is cut into stages, for models that do not fit one device."""

from collections.abc import Iterable
from itertools import pairwise

from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig
from eesd.common.weights import EMBEDDINGS, EXIT_HEAD, LM_HEAD, stored_weight
from eesd.export.graph import ExportOptions
from eesd.model.checkpoint import Checkpoint


def split_layers(checkpoint: Checkpoint, exit_config: ExitConfig, options: ExportOptions) -> list[range]:
    """The layers of each stage, so that the fullest device has as few bytes of weights as can be.

    The first stage has at least the N layers before the exit: its device also runs the draft, on the same caches.
    """
    layers, before_exit, stages = checkpoint.geometry.num_layers, exit_config.layer, options.stages
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

    def stored(name: str, shape: Iterable[int]) -> int:
        return stored_weight(name, shape, options.dtype, options.quantization).nbytes

    size = {name: stored(name, tensor.shape) for name, tensor in checkpoint.tensors.items()}
    layer = sum(nbytes for name, nbytes in size.items() if name.startswith("model.layers.0."))
    table = size[EMBEDDINGS]
    lm_head = 0 if checkpoint.geometry.tied_embeddings else size[LM_HEAD]
    # The draft's device needs an LM head too: the base model's, or the exit head's own of the same size.
    own = stored(EXIT_HEAD + LM_HEAD, checkpoint.tensors[EMBEDDINGS].shape) * exit_config.own_lm_head
    first = table + max(lm_head, own) + exit_config.blocks * layer
    return layer, first, lm_head or table
