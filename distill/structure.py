"""The structure of the head that a run trains: what the options say, else that of the head it
starts from, else a usual one."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from eesd.common.geometry import ExitConfig, Geometry

EXIT_LAYER = 4
"""Layers before the head; of a model with few layers a quarter of them."""
LARGE_VOCABULARY = 16384
"""With more tokens the LM head is a large part of a draft step, and a quarter of them is
drafted."""
LEAST_DRAFTED = 8192
NAMES = ("exit_layer", "blocks", "own_lm_head", "draft_vocab", "deep")
"""The options that say it, as in :class:`~eesd.distill.options.TrainingOptions`."""


def structure(
    options: Mapping[str, Any], geometry: Geometry, given: ExitConfig | None
) -> dict[str, Any]:
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
    usual.setdefault(
        "draft_vocab", max(LEAST_DRAFTED, geometry.vocab_size // 4) if large and trains else 0
    )
    # Reads no more.
    usual.setdefault("own_lm_head", trains and 0 < usual["draft_vocab"] < geometry.vocab_size)
    usual.setdefault(
        "deep", deep_layers(geometry.num_layers, usual["exit_layer"]) if trains else ()
    )
    return usual


def deep_layers(num_layers: int, exit_layer: int) -> tuple[int, ...]:
    """A low, a middle and the last layer: the thirds of a model, of those behind the exit."""
    thirds = {-(-num_layers * part // 3) for part in (1, 2, 3)}
    return tuple(sorted(layer for layer in thirds if layer > exit_layer))
