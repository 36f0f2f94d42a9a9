"""What an untrained exit head starts from: parameters of the base model. Also which models can have
a head. Needs no torch."""

from collections.abc import Sequence

import numpy as np

from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig, Geometry, head_fault
from eesd.common.quantization import LM_HEAD
from eesd.common.weights import FINAL_NORM, block_shapes, lm_head_name
from eesd.model.arrays import Array


def check_exit(geometry: Geometry, exit_config: ExitConfig) -> None:
    """Raise :class:`EESDError` unless a model of this geometry can have such an exit head."""
    layer = exit_config.layer
    blocks = exit_config.blocks
    if exit_config.is_whole(geometry):
        return
    if geometry.num_layers < 2:
        raise EESDError("This model has 1 layer, and an exit head needs a model of at least 2.")
    if not 1 <= layer < geometry.num_layers:
        raise EESDError(
            f"The exit layer must be between 1 and {geometry.num_layers - 1} for this "
            f"{geometry.num_layers}-layer model; "
            f"{layer} was given."
        )
    most = len(geometry.attention_layers)
    if not 0 <= blocks <= most:
        raise EESDError(
            f"The exit head must have between 0 and {most} blocks; {blocks} were given."
        )
    if fault := head_fault(geometry, exit_config):
        raise EESDError(
            "The exit head cannot have the deep layers "
            f"{', '.join(map(str, exit_config.deep))}: {fault}."
        )


def initial_names(geometry: Geometry, exit_config: ExitConfig) -> dict[str, tuple[str, ...]]:
    """Names of the base parameters that an untrained head starts from, by the names of the head's
    parameters; of several, :func:`joined` makes one.

    The blocks start from the last E layers, the norm from the final norm, and an own LM head from
    the base model's. A block's MLP starts from as many experts of its layer as it has room for.
    """
    names: dict[str, tuple[str, ...]] = {"norm.weight": (FINAL_NORM,)}
    if exit_config.own_lm_head:
        names[LM_HEAD] = (lm_head_name(geometry),)
    for index, layer in enumerate(geometry.head_layers(exit_config.blocks)):
        experts = geometry.of_layer(layer).experts
        for name in block_shapes(geometry.dense):
            parts = [name]
            if experts is not None and name.startswith("mlp."):
                count = min(experts.count, -(-geometry.intermediate_size // experts.size))
                parts = [name.replace("mlp.", f"mlp.experts.{expert}.") for expert in range(count)]
            names[f"blocks.{index}.{name}"] = tuple(
                f"model.layers.{layer}.{part}" for part in parts
            )
    return names


def joined(name: str, parts: Sequence[Array], geometry: Geometry) -> Array:
    """A parameter of a head from the base parameters that :func:`initial_names` says.

    Those of several experts stand side by side, as if a token used all of them with the same
    weight. What is too much is left out, and what is missing is 0, which adds nothing.
    """
    block = block_shapes(geometry.dense)
    shape = block.get(name.partition(".")[2].partition(".")[2])
    if shape is None or (len(parts) == 1 and parts[0].shape == shape):
        return parts[0]
    inner = 1 if name.endswith("down_proj.weight") else 0
    whole = np.concatenate(parts, inner)
    whole = whole[: shape[0], : shape[1]]
    found = np.zeros(shape, whole.dtype)
    found[: whole.shape[0], : whole.shape[1]] = whole / len(parts) if inner else whole
    return found
