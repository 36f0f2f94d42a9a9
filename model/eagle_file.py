"""Read published EAGLE-3 heads. They consist of ``config.json`` and safetensors files in the
layouts of SafeAILab, SpecForge and Speculators.

The layouts differ in their names. SafeAILab and SpecForge call the block ``midlayer``. Speculators
calls it ``layers.0`` and has its sizes in ``transformer_layer_config``. SpecForge numbers the
layers whose states are read from 0, and Speculators numbers them from 1. By default, the layers are
2, L / 2 and L - 3 (numbered from 1). EAGLE-3.1 adds norms, which are called ``norm_before_fc`` or
``fc_norm``, and ``norm_output``.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from eesd.common.architecture import FUSE, FUSE_NORM
from eesd.common.checks import first_fault, shown
from eesd.common.draft_vocab import Ids, are_draft_vocab
from eesd.common.errors import EESDError
from eesd.common.geometry import LARGEST_SIZE, Eagle, ExitConfig, Geometry, head_fault
from eesd.common.json_input import read_json_object
from eesd.common.weights import DRAFT_VOCAB, EMBEDDINGS, exit_head_shapes
from eesd.model.arrays import to_float32
from eesd.model.checkpoint import Checkpoint, stored_tensors
from eesd.model.config import NO_EFFECT
from eesd.model.families.llama import LLAMA
from eesd.model.fields import Fields
from eesd.model.rope_config import read_rope
from eesd.model.safetensors_file import CheckpointTensor

CONFIG_FILE = "config.json"
BLOCKS = ("midlayer.", "layers.0.")
"""Prefixes of the block's tensors."""
_KINDS = (
    "LlamaForCausalLMEagle3",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
)
ROPES = replace(LLAMA, ropes=("default", "linear", "llama3", "yarn"))
"""Scalings that do not depend on the text's length, so that the head's positions do not limit the
text."""
COMPARED = 1024
"""Number of rows of an embedding table that are compared."""
_MAPS = ("d2t", "t2d", "embed_tokens.weight")
_WITHOUT_EFFECT = (
    *(
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "embed_requires_grad",
        "eos_token_id",
        "max_window_layers",
    ),
    *(
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "tie_word_embeddings",
        "torch_dtype",
    ),
    *(
        "use_sliding_window",
        "sliding_window",
        "has_no_defaults_at_init",
        "model_type",
        "layer_types",
        "ttt_steps",
    ),
)


def is_eagle(directory: Path) -> bool:
    """Whether a directory looks like a published EAGLE-3 head. Such a directory has a
    ``config.json`` with a draft vocabulary."""
    path = directory / CONFIG_FILE
    return path.is_file() and "draft_vocab_size" in read_json_object(path, "fetch the head again")


def read_eagle(
    checkpoint: Checkpoint, directory: Path
) -> tuple[ExitConfig, dict[str, CheckpointTensor], Ids | None]:
    """Read a head for a model.

    Args:
        checkpoint: The base model.
        directory: Directory of the head.

    Returns:
        The head's configuration, its tensors by this project's names, and the ids of its draft
        vocabulary ([Vd], int64, ascending). The ids are None if the head predicts all tokens.

    Raises:
        EESDError: The head is damaged, has parts that are not supported, or belongs to a model with
            other sizes.
    """
    path = directory / CONFIG_FILE
    try:
        config, columns = _read_config(
            Fields(read_json_object(path, "fetch the head again")), checkpoint
        )
        if fault := head_fault(checkpoint.geometry, config):
            raise ValueError(f"it is not a head of this model: {fault}")
    except KeyError as error:
        raise EESDError(
            f"{path} has no {error.args[0]!r}; the file is incomplete, fetch it again."
        ) from None
    except ValueError as error:
        raise EESDError(f"The EAGLE-3 head {path} cannot be used: {error}.") from None
    stored = stored_tensors(directory)
    ids = None
    if columns < checkpoint.geometry.vocab_size:
        config = replace(config, draft_vocab=columns)
        ids = _draft_vocab(stored, columns, checkpoint.geometry, directory)
    _check_embeddings(stored, checkpoint, directory)
    return config, _tensors(stored, checkpoint.geometry, config, directory), ids


def _read_config(fields: Fields, checkpoint: Checkpoint) -> tuple[ExitConfig, int]:
    """Return the head's configuration and the number of tokens that it predicts. Raises ValueError,
    KeyError."""
    model = checkpoint.geometry
    kinds = fields.take("architectures", None)
    if kinds is not None and (not isinstance(kinds, list) or not kinds or kinds[0] not in _KINDS):
        raise ValueError(
            f"the architecture {shown(kinds)} is not supported; supported are {', '.join(_KINDS)}"
        )
    columns = fields.integer("draft_vocab_size", most=LARGEST_SIZE)
    nested = fields.take("eagle_config", None)
    both = (fields, Fields(nested if isinstance(nested, dict) else {}))
    layers = _read_layers(*both, model.num_layers)
    normed_residual, norm_before_fc, fc_norm, normed_output = (
        any(one.flag(name) for one in both)
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    )
    if norm_before_fc and fc_norm:
        raise ValueError("it has norm_before_fc and fc_norm, which exclude each other")
    fuse_norms = len(layers) if fc_norm else int(norm_before_fc)
    target = fields.integer("target_hidden_size", None, optional=True)
    if target not in (None, model.hidden_size):
        raise ValueError(
            f"it reads states of size {target}, and the model's have {model.hidden_size}"
        )
    _refuse_unknown(fields, ("transformer_layer_config",))
    inner = fields.take("transformer_layer_config", None)
    block = fields
    if inner is not None:
        block = Fields(inner if isinstance(inner, dict) else {})
    eagle = Eagle(layers, _read_block(block), normed_residual, fuse_norms, normed_output)
    return ExitConfig(0, 1, True, checkpoint.fingerprint(), trained=True, eagle=eagle), columns


def _read_layers(fields: Fields, nested: Fields, count: int) -> tuple[int, ...]:
    """Return the layers after which states are read, numbered from 1."""
    if nested.take("use_aux_hidden_state", True) is not True:
        raise ValueError(
            "it reads the last state only, as heads before EAGLE-3 do, which is not supported"
        )
    own, from_0 = (one.token_ids("eagle_aux_hidden_state_layer_ids") for one in (fields, nested))
    return own or tuple(index + 1 for index in from_0 or ()) or (2, count // 2, count - 3)


def _read_block(fields: Fields) -> Geometry:
    """Return the sizes of the block."""
    kind = fields.text("model_type") or "llama"
    windows = fields.take("use_sliding_window", False) and fields.take("sliding_window", None)
    fault = first_fault(
        {
            f"blocks of the model type {kind!r} are not supported; supported are llama and "
            "qwen3": kind not in ("llama", "qwen3"),
            "it has several blocks, and one is supported": (
                fields.integer("num_hidden_layers", 1) != 1
            ),
            "its activation is not silu": (
                fields.take("hidden_act", "silu") not in ("silu", "swish")
            ),
            "it has a sliding window": windows,
        }
    )
    if fault:
        raise ValueError(fault)
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", None, optional=True) or hidden // heads
    rope = read_rope(
        fields, fields.integer("max_position_embeddings", 2048, most=LARGEST_SIZE), head_dim, ROPES
    )
    bias = fields.flag("attention_bias")
    block = Geometry(
        architecture=LLAMA.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=1,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", None, optional=True) or heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied_embeddings=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=kind == "qwen3",
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
    )
    _refuse_unknown(fields, ())
    return block


def _refuse_unknown(fields: Fields, later: tuple[str, ...]) -> None:
    """Refuse unknown fields that are true, because such fields mark variants of these heads. The
    fields in ``later`` are read afterwards."""
    known = {*NO_EFFECT, *_WITHOUT_EFFECT, *later}
    on = [name for name in fields.left if name not in known and fields.raw[name] is True]
    if on:
        raise ValueError(f"it has {', '.join(map(shown, on[:3]))}, which is not supported")


def _draft_vocab(
    stored: Mapping[str, CheckpointTensor], columns: int, geometry: Geometry, directory: Path
) -> Ids:
    """Return the token of each column ([Vd], int64). The tensor ``d2t`` holds the token's id minus
    the column's number."""
    tensor = stored.get("d2t")
    if tensor is None or tensor.stored != "I64" or tensor.shape != (columns,):
        raise EESDError(
            f"The EAGLE-3 head in {directory} has no tensor d2t of {columns} integers; fetch "
            "it again."
        )
    ids = tensor.read_bytes().view(np.int64) + np.arange(columns)
    if not are_draft_vocab(ids, geometry.vocab_size):
        raise EESDError(
            f"d2t of the EAGLE-3 head in {directory} does not name ascending tokens of this "
            "model; give a head of this model."
        )
    return ids


def _check_embeddings(
    stored: Mapping[str, CheckpointTensor], checkpoint: Checkpoint, directory: Path
) -> None:
    """Refuse a head whose embedding table differs from the model's table by more than rounding.
    Such a head is for another model, or its table was trained."""
    own = stored.get("embed_tokens.weight")
    models = checkpoint.tensors[EMBEDDINGS]
    if own is None:
        return
    other = EESDError(
        f"The EAGLE-3 head in {directory} has a separate embedding table, which is not "
        "supported, or is for another model."
    )
    if own.shape != (checkpoint.geometry.vocab_size, checkpoint.geometry.hidden_size):
        raise other
    found, expected = (to_float32(tensor.read()[:COMPARED]) for tensor in (own, models))
    if np.linalg.norm(found - expected) > 0.1 * np.linalg.norm(expected):
        raise other


def _tensors(
    stored: Mapping[str, CheckpointTensor], geometry: Geometry, config: ExitConfig, directory: Path
) -> dict[str, CheckpointTensor]:
    """Return the tensors by this project's names."""
    prefix = next(
        (one for one in BLOCKS if any(name.startswith(one) for name in stored)), BLOCKS[0]
    )
    assert config.eagle is not None
    theirs = {"blocks.0.": prefix, f"{FUSE}.": "fc."}
    if config.eagle.fuse_norms > 1:
        theirs[f"{FUSE_NORM}."] = "fc_norm."
    else:
        theirs[f"{FUSE_NORM}.0."] = "input_norm."
    renamed = {
        _renamed(name, {its: own for own, its in theirs.items()}): stored[name]
        for name in stored
        if name not in _MAPS
    }
    shapes = {
        name: shape
        for name, shape in exit_head_shapes(geometry, config).items()
        if name != DRAFT_VOCAB
    }
    if unknown := sorted(renamed.keys() - shapes.keys()):
        raise EESDError(
            f"The EAGLE-3 head in {directory} has the tensor {unknown[0]}, which is not supported."
        )
    for name, shape in shapes.items():
        if name not in renamed or renamed[name].shape != shape:
            what = _renamed(name, theirs)
            raise EESDError(
                f"The EAGLE-3 head in {directory} has no tensor {what} of shape "
                f"{list(shape)}; it does not fit."
            )
    return renamed


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace the first prefix that matches a name."""
    for prefix, to in prefixes.items():
        if name.startswith(prefix):
            return to + name.removeprefix(prefix)
    return name
