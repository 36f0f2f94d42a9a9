"""A family describes how a model type of transformers differs from other model types.

A family is a file of ``families/``. It lists the fields of its ``config.json`` with their defaults,
the parts of the decoder that they choose (:class:`~eesd.common.geometry.Geometry`), and the
renaming of its tensors to the decoder's names. ARCHITECTURE.md explains how to add a family.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eesd.common.checks import shown
from eesd.common.geometry import FULL, SLIDING, Geometry
from eesd.model.arrays import Array, to_float32
from eesd.model.fields import Fields
from eesd.model.gguf_file import GgufTensor
from eesd.model.packed import PackedTensor
from eesd.model.safetensors_file import FINGERPRINTED, CheckpointTensor


class ChangedTensor:
    """A tensor whose values are changed in float32 when it is read."""

    dtype = "float32"
    name: str
    shape: tuple[int, ...]
    nbytes: int

    def __init__(
        self,
        stored: "StoredTensor",
        change: Callable[[Array], Array],
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.name = stored.name
        self.shape = stored.shape if shape is None else shape
        self.nbytes = stored.nbytes
        self._stored = stored
        self._change = change
        _ = stored.dtype  # raises for unreadable types

    def read(self) -> Array:
        return self._change(to_float32(self._stored.read()))

    def head(self) -> bytes:
        """The first kilobyte, for the fingerprint."""
        return self.read().reshape(-1)[:FINGERPRINTED].tobytes()[:FINGERPRINTED]


@dataclass(frozen=True)
class ConfigTensor:
    """A tensor whose values come from the config.

    Attributes:
        name: Its name.
        values: Its values, float32.
    """

    name: str
    values: Array

    dtype = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.values.nbytes

    def read(self) -> Array:
        """Its values."""
        return self.values

    def head(self) -> bytes:
        """The first kilobyte, for the fingerprint."""
        return self.values.tobytes()[:FINGERPRINTED]


StoredTensor = CheckpointTensor | PackedTensor | GgufTensor | ChangedTensor | ConfigTensor
Tensors = dict[str, StoredTensor]
"""The tensors of a checkpoint by name."""


class Own(NamedTuple):
    """Results of reading a family's own fields.

    Attributes:
        parts: Values of the geometry that differ from Llama's.
        positions: Number of positions beyond which the decoder's results would differ from
            transformers' results, or None if there is no limit.
        notices: Sentences for the user of the checkpoint.
        divided: Divisors of tensors, applied when they are read, by the tensors' names.
        values: Values of tensors that are not stored, by the tensors' names.
    """

    parts: Mapping[str, Any] = {}
    positions: int | None = None
    notices: tuple[str, ...] = ()
    divided: Mapping[str, float] = {}
    values: Mapping[str, Array] = {}


class Sizes(NamedTuple):
    """Sizes that a family's own fields may depend on. They are the number of layers, the size of a
    hidden state, and the epsilon of norms."""

    layers: int
    hidden: int
    eps: float


def _no_fields(_: Fields, __: Sizes) -> Own:
    return Own()


def as_stored(tensors: Tensors, _: Geometry) -> Tensors:
    """Return the tensors unchanged."""
    return tensors


class GgufFields(Fields):
    """The metadata of an architecture in a GGUF file. Names have no prefix, except in messages.

    Args:
        raw: The values by name.
        prefix: The architecture and a dot.
        tensors: Names of the file's tensors.
    """

    def __init__(self, raw: Mapping[str, Any], prefix: str, tensors: Collection[str]) -> None:
        super().__init__(raw)
        self._prefix = prefix
        self.tensors = tensors

    def take(self, name: str, default: Any = ...) -> Any:
        if default is ... and name not in self.raw:
            raise KeyError(self._prefix + name)
        return super().take(name, default)


@dataclass(frozen=True)
class Gguf:
    """Storage of a family in GGUF files of llama.cpp.

    Attributes:
        architecture: Value of ``general.architecture``.
        names: The names that differ from Llama's. They are names of modules in a block, or whole
            names of tensors in or outside of blocks. Their values are names in a Hugging Face
            checkpoint.
        biases: Maps flags of ``config.json`` to modules of a block. The module has a bias if the
            flag is true.
        fields: A function that reads the metadata that Llama does not have. It returns the
            corresponding fields of ``config.json``.
        eps: Key of the epsilon of norms.
        interleaved: Whether the stored rows of q and k are ordered for a rotation of neighbouring
            values.
        tensors: A function that converts the tensors of a file to the decoder's tensors. With None,
            they are converted like the tensors of the family's other checkpoints.
        heads_by_layer: If files list the number of KV heads of each layer, the most different
            numbers above 0 in such a list. It is 0 if they do not.
        latent: Whether ``fields`` reads the sizes of heads, because attention is latent.
        optional: Keys of sizes that files may lack, or that ``fields`` reads if they are lists.
        key: A metadata key that distinguishes the family's files from the files of another family.
            It is empty if no key is needed.
    """

    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    fields: Callable[["GgufFields", Mapping[str, Any]], dict[str, Any]] = lambda own, raw: {}
    eps: str = "attention.layer_norm_rms_epsilon"
    interleaved: bool = False
    tensors: "Callable[[Tensors, Geometry], Tensors] | None" = None
    heads_by_layer: int = 0
    latent: bool = False
    optional: tuple[str, ...] = ()
    key: str = ""


@dataclass(frozen=True)
class Family:
    """A model type of transformers, with the defaults of its fields and the conversions of its
    tensors.

    Attributes:
        model_type: Name in transformers.
        architecture: Class in transformers.
        positions: Default of ``max_position_embeddings``.
        kv_heads: Default of ``num_key_value_heads``, or None if the default is the number of heads.
        kv_heads_null: Whether null also stands for the number of heads.
        head_name: Name of the field with the size of a head.
        head_dim: Default of this field, or None if the default is hidden_size /
            num_attention_heads.
        theta: Default of ``rope_theta``.
        eps_name: Name of the field with the epsilon of norms.
        eps: Default of the epsilon.
        tied: Default of ``tie_word_embeddings``.
        inner: Default of ``intermediate_size``, or ``...`` if the field is required.
        activation: Name of the field with the activation, and its default.
        ropes: Supported scalings of the rotary embedding.
        rope_names: The family's own names for some scalings.
        original_positions: Default of ``original_max_position_embeddings``, or None if the family
            has no such field.
        activation_names: The decoder's activations by the family's own names.
        partial_rotary: Default of ``partial_rotary_factor``, or None if the whole head is rotated.
        interleaved: Whether neighbouring values of a head rotate in pairs. If not, each value of
            the first half rotates with a value of the second half.
        rope_fields: A function that selects the fields of the rotary embedding from the config's
            fields.
        own: A function that reads the fields that other families do not have.
        tensors: A function that converts the stored tensors to the decoder's tensors.
        gguf: Storage in GGUF files. It is None if such files are not supported, or if they are
            stored as files of another family.
        published: Class name in configs with custom code, if it differs from the class in
            transformers.
        by_layer: Whether the family reads ``per_layer_config``, which other families refuse.
    """

    model_type: str
    architecture: str
    positions: int
    kv_heads: int | None = None
    kv_heads_null: bool = True
    head_name: str = "head_dim"
    head_dim: int | None = None
    theta: float = 10000.0
    eps_name: str = "rms_norm_eps"
    eps: float = 1e-6
    tied: bool = False
    inner: Any = ...
    activation: tuple[str, str] = ("hidden_act", "silu")
    activation_names: Mapping[str, str] = field(default_factory=dict)
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
    rope_names: Mapping[str, str] = field(default_factory=dict)
    original_positions: int | None = None
    partial_rotary: float | None = None
    interleaved: bool = False
    rope_fields: Callable[[Fields], Fields] = lambda fields: fields
    own: Callable[[Fields, Sizes], Own] = _no_fields
    tensors: Callable[[Tensors, Geometry], Tensors] = as_stored
    gguf: Gguf | None = None
    published: str = ""
    by_layer: bool = False


LAYER_TYPES = ("full_attention", "sliding_attention")
"""Kinds of layers in transformers."""
LAYER_NORM_EPS = "attention.layer_norm_epsilon"
"""llama.cpp's key for the epsilon of norms that subtract the mean."""


def attention_biases(fields: Fields) -> dict[str, Any]:
    """Return the part of the geometry for ``attention_bias``, which adds biases to q, k, v and
    o."""
    bias = fields.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias}


def rope_or(fields: Fields, default: Mapping[str, Any]) -> Fields:
    """Return the rotary fields, with a default for ``rope_parameters``."""
    given = fields.take("rope_scaling", None) or fields.take("rope_parameters", None)
    return fields if given else Fields({**fields.raw, "rope_parameters": default})


def take_kinds(fields: Fields, types: list[str], window: int = 4096) -> dict[str, Any]:
    """Return the parts of the geometry for ``sliding_window`` (default: ``window``) and for layers
    of these types."""
    window = fields.integer("sliding_window", window, optional=True)
    if "sliding_attention" not in types:
        return {}
    if window is None:
        raise ValueError("layer_types has sliding_attention, but there is no sliding window")
    return {
        "layer_kinds": tuple(SLIDING if one == "sliding_attention" else FULL for one in types),
        "window": window,
    }


def ropes_by_kind(fields: Fields) -> dict[str, dict[str, Any]]:
    """Return ``rope_parameters`` of a family that has separate parameters for each kind of
    layer."""
    found = fields.take("rope_parameters", None)
    if found is not None and not (
        isinstance(found, dict) and all(isinstance(one, dict | None) for one in found.values())
    ):
        raise ValueError(
            f"rope_parameters is {shown(found)}, and must have an object for each kind of layers"
        )
    other = next((name for name in found or {} if name not in LAYER_TYPES), None)
    if other is not None:
        raise ValueError(
            f"rope_parameters has {shown(other)}, and must have {' and '.join(LAYER_TYPES)}"
        )
    return {kind: (found or {}).get(kind) or {} for kind in LAYER_TYPES}


def full_rope(fields: Fields, theta: float) -> Fields:
    """Return the rotary fields of layers with full attention. Old configs have them at the top
    level.

    ``theta`` is the default base.
    """
    full = ropes_by_kind(fields)["full_attention"]
    scaling = fields.take("rope_scaling", None)
    if not isinstance(scaling, dict | None):
        raise ValueError(f"rope_scaling is {shown(scaling)}, and must be an object")
    given = {"rope_theta": fields.take("rope_theta", theta)}
    rope = given | full | (scaling or {})
    if rope.get("truncate") is False and "yarn" in (rope.get("rope_type"), rope.get("type")):
        raise ValueError(
            "the rotary embedding of its full_attention has truncate: false, which "
            "transformers overlooks; set it to true for "
            "the tokens of transformers"
        )
    return Fields(given | {"rope_parameters": rope})


def local_theta(fields: Fields, theta: float, kinds: Mapping[str, Any]) -> dict[str, float]:
    """Return the part of the geometry for the rotary base of layers with a window, if there are
    such layers. ``theta`` is the default."""
    local = Fields({"rope_theta": theta} | ropes_by_kind(fields)["sliding_attention"])
    kind = local.take("rope_type", local.take("type", "default"))
    if not kinds:
        return {}
    if kind != "default":
        raise ValueError(
            f"the rope scaling {shown(kind)} of layers with a window is not supported; "
            "supported is default"
        )
    return {"local_theta": local.number("rope_theta")}


def take_positive(fields: Fields, name: str, default: float | None) -> float:
    """Return a number above 0 in a plausible range."""
    value = fields.number(name, default)
    if not 1e-6 <= value <= 1e6:
        raise ValueError(f"{name} is {value}, and must be from 1e-6 to 1e6")
    return float(value)


def take_window(fields: Fields, default: int | None = None) -> int | None:
    """Return ``sliding_window`` of a family that has a window in all layers. The window has no
    effect on texts of up to this length."""
    window: int | None = fields.integer("sliding_window", default, optional=True)
    return window


def take_layer_types(
    fields: Fields, layers: int, known: Iterable[str] = LAYER_TYPES, name: str = "layer_types"
) -> list[str] | None:
    """Return the field ``name``, which has an entry for each layer, or None if the field is absent.
    Each entry must be one of ``known``."""
    types = fields.take(name, None)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers:
        raise ValueError(f"{name} must be a list with an entry for each of the {layers} layers")
    names = list(known)  # a list, because entries of a damaged file may not be hashable
    others = [kind for kind in types if kind not in names]
    if others:
        raise ValueError(f"{name} has {shown(others[0])}; supported are {' and '.join(names)}")
    return types


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Rename some modules of blocks, by ``names``."""
    found = {}
    for name, tensor in tensors.items():
        layer, block, rest = name.partition(".layers.")
        number, _, own = rest.partition(".")
        module, _, kind = own.rpartition(".")
        found[f"{layer}{block}{number}.{names[module]}.{kind}" if module in names else name] = (
            tensor
        )
    return found


def divided(tensors: Tensors, by: Mapping[str, float]) -> Tensors:
    """Divide some of the tensors by a number."""
    made = {
        name: _divided(tensors[name], number)
        for name, number in by.items()
        if number != 1 and name in tensors
    }
    return tensors | made


def _divided(tensor: StoredTensor, number: float) -> ChangedTensor:
    return ChangedTensor(tensor, lambda values: values / number)


def rows_of(tensor: StoredTensor, start: int, stop: int) -> StoredTensor:
    """Return some rows of a tensor. They are read from the same file."""
    if isinstance(tensor, GgufTensor):
        return tensor.rows(start, stop)
    if isinstance(tensor, PackedTensor):
        return tensor.rows(np.arange(start, stop))
    assert isinstance(tensor, CheckpointTensor)
    return tensor.rows(start, stop)


def below_each_other(tensor: StoredTensor) -> StoredTensor:
    """Return one tensor [count rows, columns] for several matrices [count, rows, columns]."""
    if isinstance(tensor, GgufTensor):
        return tensor.matrices_below_each_other()
    assert isinstance(tensor, CheckpointTensor)
    return replace(tensor, shape=(prod(tensor.shape[:-1]), tensor.shape[-1]))


def split(tensors: Tensors, module: str, parts: Mapping[str, int]) -> Tensors:
    """Split a module of the blocks into ``parts``, which give the number of rows of each new
    module. A tensor of another size is not split, but refused later."""
    found = {}
    for name, tensor in tensors.items():
        before, there, kind = name.partition(f".{module}.")
        if not there or len(tensor.shape) == 0 or tensor.shape[0] != sum(parts.values()):
            found[name] = tensor
            continue
        start = 0
        for part, rows in parts.items():
            found[f"{before}.{part}.{kind}"] = rows_of(tensor, start, start + rows)
            start += rows
    return found


def gate_and_up(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Split ``gate_up_proj`` of an MLP into gate and up."""
    parts = dict.fromkeys(("gate_proj", "up_proj"), geometry.intermediate_size)
    return split(tensors, "gate_up_proj", parts)


def halves_apart(tensors: Tensors, geometry: Geometry, interleaved: bool) -> Tensors:
    """Reorder the rows of q and k for our rotary tables. This is needed if a model rotates only a
    part of each head, or rotates neighbouring values.

    If 2r values of a head are rotated, value i rotates with value i + r or, if ``interleaved``,
    value 2i with value 2i + 1. Each pair is moved to i and i + D / 2, as in a completely rotated
    head. The values that are not rotated follow in each half. Their angles are 0.
    """
    half = geometry.head_dim // 2
    rotated = geometry.rotated or half
    scaling = geometry.rope_scaling
    if scaling is not None and scaling.kind == "proportional":  # rotates halves of whole heads
        rotated = half
    if rotated == half and not interleaved:
        return tensors
    still = np.arange(2 * rotated, geometry.head_dim)
    turned = np.arange(2 * rotated)
    first, second = turned.reshape(-1, 2).T if interleaved else turned.reshape(2, -1)
    head = np.concatenate((first, still[: half - rotated], second, still[half - rotated :]))
    found = dict(tensors)
    for name, tensor in tensors.items():
        part = f".{name}".split(".")[-2]
        if (
            part in ("q_proj", "k_proj", "q_norm", "k_norm")
            and tensor.shape
            and tensor.shape[0] % geometry.head_dim == 0
        ):
            heads = np.arange(tensor.shape[0] // geometry.head_dim)[:, None] * geometry.head_dim
            found[name] = reordered(tensor, (heads + head).reshape(-1))
    return found


def reordered(tensor: StoredTensor, order: NDArray[np.int64]) -> StoredTensor:
    """Return rows of a tensor in this order."""
    if isinstance(tensor, ChangedTensor):
        shape = (len(order), *tensor.shape[1:])
        return ChangedTensor(tensor, lambda values: values[order], shape)
    if isinstance(tensor, PackedTensor):
        return tensor.rows(order)
    if isinstance(tensor, GgufTensor):
        return tensor.reordered(order)
    assert isinstance(tensor, CheckpointTensor)
    return GgufTensor(tensor, order)
