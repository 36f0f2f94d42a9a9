"""What an untrained exit head is: which heads a model can have, and the weights that they start
from."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig, Geometry, head_fault
from eesd.common.quantization import LM_HEAD
from eesd.common.weights import DRAFT_VOCAB, FINAL_NORM, block_shapes, lm_head_name
from eesd.model.decoder import ExitHead as ExitHead


def check_exit(geometry: Geometry, exit_config: ExitConfig) -> None:
    """Raise :class:`EESDError` unless a model of this geometry can have such an exit head."""
    layer, blocks = exit_config.layer, exit_config.blocks
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
    if not 0 <= blocks <= geometry.num_layers:
        raise EESDError(
            f"The exit head must have between 0 and {geometry.num_layers} blocks; {blocks} "
            "were given."
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
    for index in range(exit_config.blocks):
        layer = geometry.num_layers - exit_config.blocks + index
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


def joined(name: str, parts: Sequence[Tensor], geometry: Geometry) -> Tensor:
    """A parameter of a head from the base parameters that :func:`initial_names` says.

    Those of several experts stand side by side, as if a token used all of them with the same
    weight. What is too much is left out, and what is missing is 0, which adds nothing.
    """
    block = block_shapes(geometry.dense)
    shape = block.get(name.partition(".")[2].partition(".")[2])
    if shape is None or (len(parts) == 1 and parts[0].shape == shape):
        return parts[0]
    inner = 1 if name.endswith("down_proj.weight") else 0
    whole = torch.cat(list(parts), inner).narrow(
        inner, 0, min(shape[inner], sum(part.shape[inner] for part in parts))
    )
    found = whole.new_zeros(shape)
    found.narrow(inner, 0, whole.shape[inner]).copy_(whole / len(parts) if inner else whole)
    return found


def initial_head(
    geometry: Geometry,
    exit_config: ExitConfig,
    base: Mapping[str, Tensor],
    draft_vocab: Tensor | None = None,
) -> ExitHead:
    """Create an untrained head from the base parameters ``base``, by the names that
    :func:`initial_names` says.

    ``draft_vocab`` holds the ids of the draft vocabulary [Vd], ascending.
    """
    names = initial_names(geometry, exit_config)
    state = {
        name: joined(name, [base[source] for source in sources], geometry)
        for name, sources in names.items()
    }
    head = ExitHead(geometry, exit_config)
    if draft_vocab is not None:
        state[DRAFT_VOCAB] = draft_vocab
        state |= {LM_HEAD: state[LM_HEAD][draft_vocab]} if exit_config.own_lm_head else {}
    if exit_config.deep:
        state |= _initial_deep(geometry, len(exit_config.deep))
    head.load_state_dict(state)
    return head


def _initial_deep(geometry: Geometry, count: int) -> dict[str, Tensor]:
    """Random projections to the deep state, and one from it that adds nothing yet."""
    hidden, width = geometry.hidden_size, 2 * geometry.num_kv_heads * geometry.head_dim
    generator, found = (
        torch.Generator().manual_seed(0),
        {"deep_in_proj.weight": torch.zeros(hidden, width)},
    )
    for index in range(count):
        found[f"deep.{index}.norm.weight"] = torch.ones(hidden)
        found[f"deep.{index}.state_proj.weight"] = (
            torch.randn(width, hidden, generator=generator) / (hidden * count) ** 0.5
        )
    return found
