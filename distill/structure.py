"""The structure of the head that a run trains: what the options say, else that of the head it starts from, else a usual one."""

from collections.abc import Mapping
from dataclasses import fields
from math import prod
from typing import Any

from eesd.common.geometry import ExitConfig, Geometry
from eesd.common.weights import block_shapes, layer_shapes
from eesd.distill.options import TrainingOptions

EXIT_LAYER = 4
"""Layers before the head; of a model with few layers a quarter of them."""
LARGE_VOCABULARY = 16384
"""With more tokens the LM head is a large part of a draft step, and a quarter of them is drafted."""
LEAST_DRAFTED = 8192
NAMES = ("exit_layer", "blocks", "own_lm_head", "draft_vocab", "deep")
"""The options that say it, as in :class:`~eesd.distill.options.TrainingOptions`."""


def structure(options: Mapping[str, Any], geometry: Geometry, given: ExitConfig | None) -> dict[str, Any]:
    """The values of ``NAMES``.

    Args:
        options: The command's options; None where nothing was said.
        geometry: Shape of the model.
        given: Of the head that the run starts from; None: it starts from the model's last layers.
    """
    said = {name: options[name] for name in NAMES if options[name] is not None}
    if given is not None:
        stored = {field.name: getattr(given, field.name) for field in fields(given)}
        return {name: stored["layer" if name == "exit_layer" else name] for name in NAMES} | said
    usual = {"exit_layer": min(EXIT_LAYER, max(1, geometry.num_layers // 4)), "blocks": 1} | said
    large = geometry.vocab_size > LARGE_VOCABULARY
    trains = usual["blocks"] > 0  # else it is the model's own norm and LM head
    usual.setdefault("draft_vocab", max(LEAST_DRAFTED, geometry.vocab_size // 4) if large and trains else 0)
    usual.setdefault("own_lm_head", trains and 0 < usual["draft_vocab"] < geometry.vocab_size)  # reads no more
    usual.setdefault("deep", deep_layers(geometry.num_layers, usual["exit_layer"]) if trains else ())
    return usual


def head_config(training: TrainingOptions, base: str = "") -> ExitConfig:
    """What these options say about a head, of the model with the fingerprint ``base``."""
    return ExitConfig(
        training.exit_layer,
        training.blocks,
        training.own_lm_head,
        base,
        trained=True,
        draft_vocab=training.draft_vocab,
        deep=training.deep,
    )


def deep_layers(num_layers: int, exit_layer: int) -> tuple[int, ...]:
    """A low, a middle and the last layer: the thirds of a model, of those behind the exit."""
    thirds = {-(-num_layers * part // 3) for part in (1, 2, 3)}
    return tuple(sorted(layer for layer in thirds if layer > exit_layer))


def block_weights(geometry: Geometry) -> int:
    """Weights in the matrices of one block of a head."""
    return sum(prod(shape) for shape in block_shapes(geometry.dense).values() if len(shape) == 2)


def model_weights(geometry: Geometry, every_expert: bool = True) -> int:
    """Weights in the matrices of the model that a token meets, the LM head's included; of experts the used ones, or all."""
    experts, layers = geometry.experts, layer_shapes(geometry, range(geometry.num_layers))
    part = 1.0 if experts is None or every_expert else experts.used / experts.count
    matrices = {name: prod(shape) for name, shape in layers.items() if len(shape) == 2}
    met = sum(count * (part if ".mlp.experts." in name else 1) for name, count in matrices.items())
    return int(met) + geometry.vocab_size * geometry.hidden_size


def head_weights(geometry: Geometry, training: TrainingOptions) -> int:
    """Weights in the matrices that a head's training multiplies, the LM head's rows included."""
    state = 2 * geometry.num_kv_heads * geometry.head_dim if training.deep else 0
    rows = training.draft_vocab or geometry.vocab_size
    return training.blocks * block_weights(geometry) + geometry.hidden_size * (state * (len(training.deep) + 1) + rows)
