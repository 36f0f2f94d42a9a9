"""The initial parameters of an untrained exit head, which come from the base model, and the check
whether a model can have a head. This module needs no torch."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from eesd.common.architecture import Model
from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig, Geometry, head_fault
from eesd.common.quantization import LM_HEAD, Shape
from eesd.common.shapes import block_weights
from eesd.common.weights import FINAL_NORM, lm_head_name
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
    """Return the names of the base parameters for each parameter of an untrained head.
    :func:`joined` combines several parameters into one.

    The blocks start from the last E layers, the norm starts from the final norm, and a separate LM
    head starts from the base model's LM head. If a layer has experts, a block's MLP starts from the
    layer's first experts, up to the MLP's width.
    """
    names: dict[str, tuple[str, ...]] = {"norm.weight": (FINAL_NORM,)}
    if geometry.norm_bias:
        names["norm.bias"] = (FINAL_NORM.replace(".weight", ".bias"),)
    if exit_config.own_lm_head:
        names[LM_HEAD] = (lm_head_name(geometry),)
    for index, layer in enumerate(geometry.head_layers(exit_config.blocks)):
        experts = geometry.of_layer(layer).experts
        for name in _block_shapes(geometry, exit_config, index):
            parts = [name]
            if geometry.parallel:  # one norm for attention and MLP
                parts = [name.replace("post_attention_layernorm", "input_layernorm")]
            if experts is not None and not experts.beside and name.startswith("mlp."):
                count = min(experts.count, -(-geometry.intermediate_size // experts.size))
                parts = [name.replace("mlp.", f"mlp.experts.{expert}.") for expert in range(count)]
            names[f"blocks.{index}.{name}"] = tuple(
                f"model.layers.{layer}.{part}" for part in parts
            )
    return names


def _block_shapes(geometry: Geometry, exit_config: ExitConfig, index: int) -> dict[str, Shape]:
    """Return the name and the shape of every weight of a block of the head."""
    return block_weights(replace(Model(geometry, exit_config).exit_block(index), prefix=""))


def joined(name: str, parts: Sequence[Array], geometry: Geometry, exit_config: ExitConfig) -> Array:
    """Combine the base parameters of :func:`initial_names` into one parameter of a head.

    Experts are joined side by side, as if a token used all of them with the same weight. A narrower
    MLP takes their first rows. If rows are missing, they are 0 and add nothing.
    """
    _, _, of_block = name.partition("blocks.")
    index, _, within = of_block.partition(".")
    shape = _block_shapes(geometry, exit_config, int(index)).get(within) if within else None
    if shape is None or (len(parts) == 1 and parts[0].shape == shape):
        return parts[0]
    inner = name.endswith("down_proj.weight")
    whole = np.concatenate(parts, int(inner))[: shape[0], : shape[1]]
    if inner:
        whole = whole / len(parts)
    found = np.zeros(shape, whole.dtype)
    found[: whole.shape[0], : whole.shape[1]] = whole
    return found
