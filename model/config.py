"""Read a Hugging Face ``config.json`` as transformers reads it.

Every known field is applied, has no effect, or is refused by name. Unknown fields are reported,
because transformers ignores them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eesd.common.checks import shown
from eesd.common.errors import EESDError
from eesd.common.geometry import LARGEST_SIZE, MOST_LAYERS, Geometry
from eesd.common.json_input import read_json_object
from eesd.common.manifest import SamplingDefaults
from eesd.model.arrays import Array
from eesd.model.families import FAMILIES
from eesd.model.family import Family, Sizes
from eesd.model.fields import Fields
from eesd.model.generation_config import (
    GENERATION_CONFIG_FILE,
    GENERATION_FIELDS,
    parse_generation_config,
)
from eesd.model.packing import Packing, read_packing
from eesd.model.rope_config import read_rope
from eesd.model.text_part import text_fields

MODELOPT_FILE = "hf_quant_config.json"
"""ModelOpt describes the quantization in this file if ``config.json`` does not describe it."""
REMEDY = "give a complete Hugging Face model directory, or fetch the file again"
_READ = ("*.json", "*.jinja", "merges.txt", "tokenizer.model", "additional_chat_templates/*")
"""Files of a model directory, besides its weights, that EESD or transformers read."""

ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""The decoder's activations by their names in transformers."""
NO_EFFECT = frozenset(
    (
        *(
            "_attn_implementation",
            "_name_or_path",
            "attention_dropout",
            "attn_implementation",
            "chunk_size_feed_forward",
        ),
        *(
            "id2label",
            "initializer_range",
            "label2id",
            "model_max_length",
            "name_or_path",
            "output_attentions",
        ),
        *("auto_map", "cache_implementation", "embd_pdrop", "resid_pdrop"),
        *(
            "output_hidden_states",
            "pad_token_id",
            "pretraining_tp",
            "problem_type",
            "return_dict",
            "tokenizer_class",
        ),
        *(
            "torchscript",
            "transformers_version",
            "unsloth_fixed",
            "unsloth_version",
            "use_bfloat16",
            "use_cache",
        ),
    )
)
"""Fields that do not change the results of a decoder for given tokens."""
OTHER_FAMILIES = (
    "attention_bias",
    "max_window_layers",
    "mlp_bias",
    "sliding_window",
    "use_sliding_window",
)
"""Fields of some families. transformers ignores them in the configs of other families."""
REFUSED = {
    "compression_config": "the weights are quantized; give the unquantized checkpoint",
    "attention_chunk_size": "attention in chunks is not supported",
    "text_config": "a model of several parts is not supported; give a text model",
    "vision_config": "a model of several parts is not supported; give a text model",
    "per_layer_config": "layers of different shapes are not supported",
    "transformers_weights": "rename the weights to model.safetensors and remove the field",
}
"""Fields that change which weights are used or how they are used. Each has the reason for refusing
it."""


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a checkpoint.

    Attributes:
        family: Its family.
        geometry: Geometry of the decoder.
        max_positions: Number of positions that the model supports.
        dtype: Element type of the checkpoint, such as ``bfloat16``. It is None if it is not in the
            config.
        bos_token_id: Token that begins a text, or None if the model has no such token.
        eos_token_ids: Tokens that end a text.
        notices: Sentences about ignored fields. The export shows them.
        packing: Storage of quantized weights, or None if no weight is quantized.
        divided: Divisors of tensors, by the tensors' names. A tensor is divided when it is read.
        values: Values of tensors that are not in the files, by the tensors' names.
        whole: If this is the text model of a model with several parts, the class of that model. It
            is empty for a plain text model.
        sampling: Sampling options of ``generation_config.json`` or, without that file, of
            ``config.json``.
    """

    family: Family
    geometry: Geometry
    max_positions: int
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    notices: tuple[str, ...] = ()
    packing: Packing | None = None
    divided: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, Array] = field(default_factory=dict)
    whole: str = ""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)


def load_config(model_dir: Path) -> ModelConfig:
    """Read ``config.json`` and ``generation_config.json`` of a model directory.

    Raises:
        EESDError: A file is missing or damaged, a link is broken, or the decoder does not implement
            the architecture or one of its options.
    """
    for file in sorted(path for pattern in _READ for path in model_dir.glob(pattern)):
        if not file.exists():  # transformers would treat the file as absent
            raise EESDError(
                f"{file} is a link that leads nowhere; fetch the model again, or delete the "
                "link to do without it."
            )
    path = model_dir / "config.json"
    other = model_dir / MODELOPT_FILE
    raw = read_json_object(path, REMEDY)
    if raw.get("quantization_config") is None and other.exists():
        found = read_json_object(other, REMEDY).get("quantization")
        if isinstance(found, dict) and found.get("quant_algo") is not None:
            raw["quantization_config"] = {"quant_method": "modelopt"} | found
    try:
        text, whole = text_fields(raw)
    except ValueError as error:
        raise EESDError(f"{path} cannot be used: {error}.") from None
    fields = Fields(text)
    file = model_dir / GENERATION_CONFIG_FILE
    if file.exists():
        generation = read_json_object(file, "fetch the file again, or delete it")
    else:  # transformers reads the fields of config.json
        generation = {name: raw[name] for name in GENERATION_FIELDS if raw.get(name) is not None}
        fields.taken |= generation.keys()
    config = parse_config(fields, path)
    found = parse_generation_config(generation, str(file))
    notices = config.notices
    if whole:
        notices += (
            f"config.json: of {whole} the text model alone is used; images are not supported.",
        )
    eos = config.eos_token_ids if found.eos_token_ids is None else found.eos_token_ids
    return replace(config, sampling=found.sampling, eos_token_ids=eos, whole=whole, notices=notices)


def parse_config(fields: Fields, path: Path) -> ModelConfig:
    """Parse the fields of a ``config.json``.

    Args:
        fields: The fields.
        path: The file that has the fields. Messages name it.

    Raises:
        EESDError: A field is missing or damaged, or the decoder does not implement the architecture
            or one of its options.
    """
    try:
        return _read(fields, _family(fields))
    except KeyError as error:
        raise EESDError(
            f"{path} has no {error.args[0]!r}; the file is incomplete, fetch it again."
        ) from None
    except (ValueError, OverflowError) as error:
        raise EESDError(f"{path} cannot be used: {error}.") from None


def _family(fields: Fields) -> Family:
    """Return the family. The fields ``model_type`` and ``architectures`` must name the same family,
    although transformers uses ``model_type`` alone."""
    names = fields.take("architectures", None)
    model_type = fields.text("model_type")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise ValueError(f"architectures is {shown(names)}, and must be a list of names")
    family = FAMILIES.get(model_type or "")
    named = f"of model_type {model_type!r}"
    if names:
        named = names[0]
    elif family:
        named = family.architecture
    known = [one for one in FAMILIES.values() if named in (one.architecture, one.published)]
    if not known:
        raise EESDError(
            f"The architecture {named[:80]} is not supported; supported model types are "
            f"{', '.join(FAMILIES)}."
        )
    if model_type is not None and family not in known:
        raise ValueError(
            f"model_type is {model_type!r}, which is not the model type of the architecture {named}"
        )
    return family or known[0]


def _read(fields: Fields, family: Family) -> ModelConfig:
    for name, reason in REFUSED.items():
        if name == "per_layer_config" and family.by_layer:
            continue
        if fields.take(name, None) is not None:
            raise ValueError(f"it has the field {name}: {reason}")
    quantized = fields.take("quantization_config", None)
    packing = None if quantized is None else read_packing(quantized)
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    head_dim = _head_dim(fields, family, hidden, heads)
    positions = fields.integer("max_position_embeddings", family.positions, most=LARGEST_SIZE)
    rope = read_rope(family.rope_fields(fields), positions, head_dim, family)
    dtype = fields.text("dtype")
    torch_dtype = fields.text("torch_dtype")
    sizes = {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", family.inner),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": fields.integer(
            "num_key_value_heads", family.kv_heads, optional=family.kv_heads_null
        )
        or heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.number(family.eps_name, family.eps),
        "tied_embeddings": fields.flag("tie_word_embeddings", family.tied),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "rotated": rope.rotated,
        "activation": _activation(fields, family),
    }
    own = family.own(fields, Sizes(layers, hidden, sizes["rms_norm_eps"]))
    return ModelConfig(
        family=family,
        geometry=Geometry(**{"architecture": family.architecture} | sizes | dict(own.parts)),
        max_positions=min(rope.positions, own.positions or rope.positions),
        dtype=dtype or torch_dtype,
        bos_token_id=fields.integer("bos_token_id", None, optional=True, least=-1),
        eos_token_ids=fields.token_ids("eos_token_id") or (),
        notices=(
            *rope.notices,
            *own.notices,
            *_notices(fields, family, packing.unknown if packing else ()),
        ),
        packing=packing,
        divided=own.divided,
        values=own.values,
    )


def _activation(fields: Fields, family: Family) -> str:
    name, default = family.activation
    given = fields.take(name, default)
    names = ACTIVATION_NAMES | dict(family.activation_names)
    found = names.get(str(given))
    if found is None:
        raise ValueError(
            f"the activation {shown(given)} is not supported; supported are "
            f"{', '.join(map(repr, names))}"
        )
    return found


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    given: int | None = fields.integer(family.head_name, family.head_dim, optional=True)
    if given is None and hidden % heads:
        raise ValueError(
            f"num_attention_heads {heads} does not divide hidden_size {hidden}, and there is "
            "no head_dim"
        )
    return given or hidden // heads


def _notices(fields: Fields, family: Family, of_packing: Sequence[str]) -> list[str]:
    """Return sentences about the fields that were not read, including the fields of
    ``quantization_config``."""
    without_windows = set() if fields.raw.get("use_sliding_window") else {"max_window_layers"}
    left = [name for name in fields.left if name not in NO_EFFECT | without_windows]
    foreign = [name for name in left if name in OTHER_FAMILIES and fields.raw[name] is not False]
    unknown = [name for name in left if name not in OTHER_FAMILIES]
    unknown += [f"quantization_config.{name}" for name in of_packing]
    notices = []
    if foreign:
        notices.append(
            f"config.json: {family.architecture} has no {', '.join(foreign)}; ignored, as "
            "transformers does."
        )
    if unknown:
        names = ", ".join(shown(name) for name in unknown[:8])
        if len(unknown) > 8:
            names += f" and {len(unknown) - 8} more"
        notices.append(f"config.json: unknown fields are ignored, as transformers does: {names}.")
    return notices
