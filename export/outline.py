"""Predict the engine directory of an export with default options, from a model's configuration
alone."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig, Geometry, draft_caches, draft_columns, exit_caches
from eesd.common.manifest import (
    DEFAULT_SLOTS,
    DEFAULT_TOP_K,
    DEFAULT_TREE_NODES,
    FORMAT_VERSION,
    GraphInfo,
    Manifest,
)
from eesd.common.quantization import DTYPES, MXFP4, Quantization, Quantizations, is_linear
from eesd.common.weights import layer_shapes
from eesd.export.engine_dir import stored_head, untrained_draft
from eesd.export.make import choose_quantization, most_have_few_bits
from eesd.model.checkpoint import Checkpoint
from eesd.model.config import ModelConfig, load_config
from eesd.model.exit_head_file import HEAD_FILES
from eesd.model.hub import find_model
from eesd.model.packing import OF_EXPERTS


@dataclass(frozen=True)
class Outline:
    """The properties of a model, without its weights, that the choices of an export depend on.
    :class:`Checkpoint` has the same attributes.

    Attributes:
        geometry: Geometry of the model.
        quantization: Quantization of the model's weights, or None if they are not quantized.
        own_levels: Quantizations of single tensors, which are used for MXFP4 experts. (The tensors
            of GGUF files also have levels, but these files are opened instead.)
    """

    geometry: Geometry
    quantization: Quantization | None
    own_levels: dict[str, Quantization] = field(default_factory=dict)


def outlined(name: str) -> Manifest:
    """Predict the manifest of an export with default options. It has no descriptions of files. No
    weights are read or downloaded.

    Args:
        name: A model as ``eesd-export`` takes it. This function reads ``config.json`` of a
            directory, or the header of a GGUF file.

    Raises:
        EESDError: There is no such model, or it is not supported.
    """
    path = find_model(name, weights=False)
    head = None
    source: Checkpoint | Outline
    # The weights show whether a head belongs to the model.
    if path.is_file() or any((path / name).exists() for name in HEAD_FILES):
        source = Checkpoint(path)
        config = source.config
        dtype = source.dtype
        head = stored_head(source, path).config if path.is_dir() else None
    else:
        config = load_config(path)
        source = Outline(config.geometry, _own_quantization(config), _own_levels(config))
        dtype = config.dtype or ""
    if dtype not in DTYPES:
        raise EESDError(
            f"{path / 'config.json'} does not say a type of weights that can be exported; "
            "export the model itself."
        )
    geometry = config.geometry
    quantization = choose_quantization(source, dtype, None, None, None, None, False, head is None)
    if head is None:
        few = most_have_few_bits(geometry, quantization)
        if few:
            quantization = replace(quantization, draft=None)
        head = untrained_draft(geometry, not few)
    return outline(path, config, dtype, head, quantization)


def outline(
    path: Path, config: ModelConfig, dtype: str, head: ExitConfig, quantization: Quantizations
) -> Manifest:
    """Returns the manifest of an export of the model at ``path`` with this head and quantization.
    It has no descriptions of files."""
    geometry = config.geometry
    return Manifest(
        format_version=FORMAT_VERSION,
        model=path.name,
        geometry=geometry,
        exit_head=head,
        dtype=dtype,
        quantization=quantization,
        max_seq_len=min(config.max_positions, DEFAULT_SLOTS),
        max_tree_nodes=DEFAULT_TREE_NODES,
        draft_top_k=min(DEFAULT_TOP_K, draft_columns(geometry, head)),
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        sampling=config.sampling,
        draft=GraphInfo("draft.onnx", tuple(draft_caches(geometry, head)), (), ()),
        verify=(GraphInfo("verify.onnx", tuple(range(exit_caches(geometry, head).stop)), (), ()),),
        files={},
        linked={},
        tools={},
        plans={},
    )


def _own_levels(config: ModelConfig) -> dict[str, Quantization]:
    """The quantizations of single tensors, which only MXFP4 experts have."""
    if config.packing is None or config.packing.layout != OF_EXPERTS:
        return {}
    names = layer_shapes(config.geometry, range(config.geometry.num_layers))
    return {name: MXFP4 for name in names if ".experts." in name and is_linear(name)}


def _own_quantization(config: ModelConfig) -> Quantization | None:
    """Returns the quantization that keeps the levels of all layers. Latent attention transposes a
    part of its weights, so models with latent attention have no such quantization."""
    if config.packing is None or config.geometry.latent is not None:
        return None
    shapes = layer_shapes(config.geometry, range(config.geometry.num_layers))
    return config.packing.quantization(
        {shape[1] for name, shape in shapes.items() if is_linear(name)}
    )
