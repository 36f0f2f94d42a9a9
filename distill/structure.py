"""Choose the structure of the head to train. It comes from the options, from the head that the run
starts from, or from the model's size."""

from collections.abc import Mapping
from dataclasses import fields
from math import prod
from typing import Any

from eesd.common.geometry import ExitConfig, Geometry
from eesd.common.weights import exit_head_shapes

EXIT_LAYER = 2
"""Number of layers before the head. A small model has a quarter of its layers before the head."""
LARGE_VOCABULARY = 16384
"""Vocabulary size above which the LM head is a large part of a draft step, so the head predicts
only a quarter of all tokens."""
LEAST_DRAFTED = 8192
MOST_DRAFTED = 16384
"""Bounds of the draft vocabulary."""
MOST_WEIGHTS = 10_000_000
"""Maximum number of weights of a head (20 MB in 16 bits). Reading them takes a small part of a
draft step, and few texts are enough to train them."""
MLP_STEP = 256
"""The width of a narrow MLP is a multiple of this number, which fits blocks of quantized
weights."""
NAMES = ("exit_layer", "blocks", "own_lm_head", "draft_vocab", "deep", "mlp")
"""The names of the options for the structure, as in
:class:`~eesd.distill.options.TrainingOptions`."""


def structure(
    options: Mapping[str, Any], geometry: Geometry, given: ExitConfig | None
) -> dict[str, Any]:
    """Return the values of the options ``NAMES``.

    Args:
        options: The command's options. Options that were not given are None.
        geometry: Shape of the model.
        given: Configuration of the head that the run starts from, or None to start from the model's
            last layers.
    """
    said = {name: options[name] for name in NAMES if options[name] is not None}
    if given is not None:
        stored = {field.name: getattr(given, field.name) for field in fields(given)}
        return {name: stored["layer" if name == "exit_layer" else name] for name in NAMES} | said
    trains = said.get("blocks", 1) > 0  # without blocks, a head is the model's norm and LM head
    layer = said.get("exit_layer", min(EXIT_LAYER, max(1, geometry.num_layers // 4)))
    usual: dict[str, Any] = {"exit_layer": layer, "blocks": 1, "draft_vocab": 0, "deep": ()}
    if trains and geometry.vocab_size > LARGE_VOCABULARY:
        quarter = geometry.vocab_size // 4
        usual["draft_vocab"] = min(max(LEAST_DRAFTED, quarter), MOST_DRAFTED)
    if trains:
        usual["deep"] = deep_layers(geometry.num_layers, layer)
    found = usual | said
    # Without blocks there is no separate LM head. Too many blocks are refused later.
    if not 0 < found["blocks"] <= len(geometry.attention_layers):
        return {"own_lm_head": False, "mlp": None} | found
    fits = _weights(geometry, found | {"own_lm_head": True}) <= MOST_WEIGHTS
    drafts_few = 0 < found["draft_vocab"] < geometry.vocab_size
    found.setdefault("own_lm_head", drafts_few and fits)
    found.setdefault("mlp", _mlp(geometry, found))
    return found


def _weights(geometry: Geometry, found: dict[str, Any]) -> int:
    """Return the number of weights of a head."""
    config = ExitConfig(
        found["exit_layer"],
        found["blocks"],
        found["own_lm_head"],
        draft_vocab=found["draft_vocab"],
        deep=found["deep"],
        mlp=found.get("mlp"),
    )
    return sum(map(prod, exit_head_shapes(geometry, config).values()))


def _mlp(geometry: Geometry, found: dict[str, Any]) -> int | None:
    """Return the MLP width for a head of at most :data:`MOST_WEIGHTS` weights, or None for the
    width of the model's MLPs."""
    if _weights(geometry, found) <= MOST_WEIGHTS:
        return None
    free = MOST_WEIGHTS - _weights(geometry, found | {"mlp": 0})
    blocks: int = found["blocks"]
    room = free // (3 * geometry.hidden_size * blocks)
    return max(0, room // MLP_STEP * MLP_STEP)


def deep_layers(num_layers: int, exit_layer: int) -> tuple[int, ...]:
    """Return the layers at one third, two thirds and the end of a model, without the layers up to
    the exit."""
    thirds = {-(-num_layers * part // 3) for part in (1, 2, 3)}
    return tuple(sorted(layer for layer in thirds if layer > exit_layer))
