"""Read the storage of a checkpoint's quantized weights from ``quantization_config``, in the formats
of several publishers.

This concerns only weights. Activations and KV caches keep the engine's element type, even if a
config specifies their quantization.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from eesd.common.checks import shown
from eesd.common.quantization import BLOCKS, FP8, Quantization
from eesd.model.fields import Fields

GPTQ = "gptq"
AWQ = "awq"
WORDS = "words"
BYTES = "bytes"
FLOATS = "fp8"
NVFP4 = "nvfp4"
OF_EXPERTS = "mxfp4"
"""Layouts of a quantized weight. :mod:`eesd.model.packed` reads them."""
_NO_EFFECT = frozenset(
    (
        *(
            "act_group_aware",
            "activation_scale_ub",
            "activation_scheme",
            "backend",
            "batch_size",
            "block_name_to_quantize",
        ),
        *(
            "cache_block_outputs",
            "damp_auto_increment",
            "damp_percent",
            "dataset",
            "dequantize",
            "disable_exllama",
            "do_fuse",
        ),
        *(
            "exclude_modules",
            "exllama_config",
            "fuse_max_seq_len",
            "global_compression_ratio",
            "ignore",
            "ignored_layers",
        ),
        *(
            "kv_cache_quant_algo",
            "kv_cache_scheme",
            "lm_head",
            "max_input_length",
            "meta",
            "method",
            "model_file",
        ),
        *(
            "model_file_base_name",
            "model_name_or_path",
            "model_seqlen",
            "module_name_preceding_first_block",
        ),
        *(
            "modules_in_block_to_quantize",
            "modules_to_convert",
            "modules_to_fuse",
            "modules_to_not_convert",
            "mse",
        ),
        *(
            "pad_token_id",
            "producer",
            "quantization_status",
            "quantizer",
            "static_groups",
            "tokenizer",
            "true_sequential",
        ),
        *("use_cuda_fp16", "use_exllama", "version"),
    )
)
"""Fields without effect here. They concern the search for levels, the software that uses the
levels, other quantized parts, or the layers that have levels (which the tensors also show)."""
_FORMATS = {
    ("int", 4, "pack-quantized"): WORDS,
    ("int", 8, "pack-quantized"): WORDS,
    ("int", 8, "int-quantized"): BYTES,
    ("int", 8, "naive-quantized"): BYTES,
    ("float", 8, "float-quantized"): FLOATS,
    ("float", 8, "naive-quantized"): FLOATS,
    ("float", 4, "nvfp4-pack-quantized"): NVFP4,
}
"""Layouts of compressed-tensors, by the type, the number of bits and the format of the weights."""
_ALGORITHMS = {
    "FP8": FLOATS,
    "FP8_PER_CHANNEL_PER_TOKEN": FLOATS,
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
}
"""Layouts of ModelOpt by ``quant_algo``."""


@dataclass(frozen=True)
class Packing:
    """Storage of a checkpoint's quantized weights.

    Attributes:
        layout: One of the layouts above.
        bits: 4 or 8.
        group: Number of consecutive inputs that share a scale, or None if all inputs of an output
            share one.
        symmetric: Whether weights have no zero points, or every zero point is the middle of the
            range.
        offset: Number to add to a stored zero point.
        rows: Number of consecutive outputs that share a scale, if a group covers several.
        consecutive: Whether groups consist of consecutive inputs, according to the config.
        unknown: Names of unknown fields.
    """

    layout: str
    bits: int
    group: int | None
    symmetric: bool = True
    offset: int = 0
    rows: int = 1
    consecutive: bool = True
    unknown: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Element type of the levels. Engines do not support ``uint8``. They support NVFP4 only if
        its factor is a power of two, and MXFP4 only in single tensors."""
        integers = f"{'' if self.symmetric else 'u'}int{self.bits}"
        return {FLOATS: FP8, NVFP4: NVFP4, OF_EXPERTS: OF_EXPERTS}.get(self.layout, integers)

    def quantization(self, widths: set[int]) -> Quantization | None:
        """Return the quantization of an engine directory with these levels, or None if engines do
        not support it. A scale may be repeated for several blocks.

        Args:
            widths: The input sizes of all quantized weights.
        """
        shared = gcd(*widths, self.group or 0)
        fitting = [size for size in BLOCKS if shared % size == 0]
        if not fitting or not self.consecutive or self.kind not in ("int4", "uint4", "int8", FP8):
            return None
        # A draft can read half of the bits only in blocks of 32.
        block = min(fitting) if self.kind == "int8" else max(fitting)
        return Quantization(self.kind, block, scales="float32" if self.kind == FP8 else None)


def read_packing(raw: Any) -> Packing:
    """Read ``quantization_config``.

    Raises:
        ValueError: The method or one of its options is not supported.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"quantization_config is {shown(raw)}, and must be an object")
    fields = Fields(raw)
    # Older versions of ModelOpt do not name the method.
    method = fields.take("quant_method", "modelopt" if "quant_algo" in raw else None)
    reader = _METHODS.get(str(method))
    if reader is None:
        raise ValueError(
            f"quantization_config has the method {shown(method)}; supported are "
            f"{', '.join(_METHODS)}, or unquantized weights"
        )
    packing = reader(fields)
    unknown = tuple(name for name in fields.left if name not in _NO_EFFECT)
    return Packing(**(vars(packing) | {"unknown": unknown}))


def _group(fields: Fields, default: int | None) -> int | None:
    """Return ``group_size``, or None if a group has all inputs."""
    group = fields.take("group_size", default)
    if group is None:
        return None
    if type(group) is not int or (group != -1 and group < 1):
        raise ValueError(
            f"quantization_config has group_size {shown(group)}, and must have -1 or a number "
            "of inputs"
        )
    return None if group == -1 else group


def _bits(fields: Fields, method: str, known: tuple[int, ...]) -> int:
    bits: int = fields.integer("bits")
    if bits not in known:
        raise ValueError(
            f"quantization_config has {bits} bits, which is not supported for {method}"
        )
    return bits


def _gptq(fields: Fields) -> Packing:
    layouts = {name: fields.text(name) for name in ("checkpoint_format", "format")}
    layout = layouts["checkpoint_format"] or layouts["format"] or "gptq"
    if layout not in ("gptq", "gptq_v2") or fields.flag("is_marlin_format"):
        raise ValueError(
            f"quantization_config has the layout {shown(layout)}; supported are gptq and gptq_v2"
        )
    dynamic = fields.take("dynamic", None) or {}
    # "-:" names layers that stay unquantized.
    if not isinstance(dynamic, Mapping) or not all(name.startswith("-:") for name in dynamic):
        raise ValueError(
            "quantization_config has dynamic options, which differ between layers; they are "
            "not supported"
        )
    if fields.text("pack_dtype") not in (None, "int32"):
        raise ValueError(
            "quantization_config has a pack_dtype other than int32, which is not supported"
        )
    bits = _bits(fields, "gptq", (4, 8))
    group = _group(fields, 128)
    symmetric = fields.flag("sym", True)
    consecutive = group is None or not fields.flag("desc_act")
    return Packing(
        GPTQ, bits, group, symmetric, 0 if layout == "gptq_v2" else 1, consecutive=consecutive
    )


def _awq(fields: Fields) -> Packing:
    versions = {name: fields.text(name) for name in ("version", "format")}
    version = (versions["version"] or versions["format"] or "gemm").lower()
    if version != "gemm" or fields.take("backend", None) == "llm-awq":
        wrong = version if version != "gemm" else "llm-awq"
        raise ValueError(f"quantization_config has the version {shown(wrong)}; supported is gemm")
    if not fields.flag("zero_point", True):
        raise ValueError("quantization_config has zero_point false, which is not supported for awq")
    return Packing(AWQ, _bits(fields, "awq", (4,)), _group(fields, 128), symmetric=False)


def _block(fields: Fields, name: str) -> tuple[int, int | None]:
    """Return the numbers of outputs and inputs that share a scale. The result is 1 and None if each
    output has one scale, or if the whole weight has one."""
    block = fields.take(name, None)
    if block is None:
        return 1, None
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise ValueError(f"quantization_config has {name} {shown(block)}, and must have two sizes")
    return block[0], block[1]


def _fp8(fields: Fields) -> Packing:
    for name, known in (
        ("fmt", ("e4m3",)),
        ("scale_fmt", ("float", "ue8m0")),
        ("expert_dtype", ("fp8",)),
    ):
        if fields.text(name) not in (None, *known):
            raise ValueError(
                f"quantization_config has {name} {shown(fields.raw[name])}; supported is "
                f"{' or '.join(known)}"
            )
    rows, columns = _block(fields, "weight_block_size")
    return Packing(FLOATS, 8, columns, rows=rows)


def _compressed(fields: Fields) -> Packing:
    for name in ("sparsity_config", "transform_config"):
        of = fields.take(name, None) or {}
        if (
            not isinstance(of, Mapping)
            or of.get("config_groups")
            or of.get("format", "dense") != "dense"
        ):
            raise ValueError(f"quantization_config has a {name}, which is not supported")
    groups = fields.take("config_groups", None)
    layout = fields.text("format")
    if not isinstance(groups, Mapping) or not all(
        isinstance(group, Mapping) for group in groups.values()
    ):
        raise ValueError(
            f"quantization_config has config_groups {shown(groups)}, and must have an object "
            "for each group"
        )
    schemes = [_scheme(Fields(group), layout) for group in groups.values()]
    if not schemes or any(one != schemes[0] for one in schemes):
        raise ValueError(
            "quantization_config has groups of layers that are quantized in different ways, "
            "which is not supported"
        )
    return schemes[0]


def _scheme(group: Fields, layout: str | None) -> Packing:
    """Return how compressed-tensors stores the weights of a group of layers."""
    raw = group.take("weights", None)
    layout = group.text("format") or layout
    if not isinstance(raw, Mapping):
        raise ValueError(
            "quantization_config has a group of layers without quantized weights, which is "
            "not supported"
        )
    weights = Fields(raw)
    bits = weights.integer("num_bits", 8)
    kind = weights.text("type") or "int"
    strategy = weights.text("strategy")
    found = _FORMATS.get((kind, bits, layout or ""))
    if found is None or weights.take("dynamic", False):
        raise ValueError(
            f"quantization_config has weights of {bits} bits of type {shown(kind)} in the "
            f"format {shown(layout)}; "
            "supported are " + ", ".join(f"{name} ({of} {count})" for of, count, name in _FORMATS)
        )
    if strategy not in (None, "tensor", "channel", "group", "block", "tensor_group"):
        raise ValueError(
            f"quantization_config has the strategy {shown(strategy)}, which is not supported"
        )
    size = _group(weights, None)
    if found == NVFP4 and size != 16:
        raise ValueError(
            f"quantization_config has group_size {shown(size)}; nvfp4-pack-quantized has 16"
        )
    consecutive = weights.take("actorder", None) not in ("group", "dynamic", True)
    rows, columns = _block(weights, "block_structure") if strategy == "block" else (1, size)
    return Packing(
        found, bits, columns, weights.flag("symmetric", True), rows=rows, consecutive=consecutive
    )


def _modelopt(fields: Fields) -> Packing:
    fields.taken.add("config_groups")  # repeats the other fields
    algorithm = fields.text("quant_algo") or ""
    layout = _ALGORITHMS.get(algorithm.upper())
    if layout is None:
        raise ValueError(
            f"quantization_config has the quant_algo {shown(algorithm)}; supported are "
            f"{', '.join(_ALGORITHMS)} of modelopt"
        )
    size = _group(fields, 16)
    if layout == NVFP4 and size != 16:
        raise ValueError(f"quantization_config has group_size {shown(size)}; NVFP4 has 16")
    if layout == NVFP4:
        return Packing(layout, 4, 16)
    return Packing(layout, 8, None)


def _mxfp4(_: Fields) -> Packing:
    return Packing(OF_EXPERTS, 4, 32)


_METHODS = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
