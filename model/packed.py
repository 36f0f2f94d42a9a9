"""Weights that a checkpoint stores quantized, as GPTQ and AWQ do. Their levels are taken as they are.

Both methods store a linear layer as three tensors, where a level ``q`` stands for the weight ``scale * (q - zero_point)``:

* GPTQ: ``qweight`` [in / p, out], int32 of p levels each, consecutive along the inputs; ``qzeros`` [groups, out / p], along the
  outputs; ``scales`` [groups, out]; ``g_idx`` [in], the group of each input. ``qzeros`` holds the zero point minus one, except
  with the ``checkpoint_format`` ``gptq_v2``.
* AWQ: ``qweight`` [in, out / 8] and ``qzeros`` [groups, out / 8], both along the outputs in the order 0, 2, 4, 6, 1, 3, 5, 7.

p is 32 divided by the bits. So both are blockwise quantization along the inputs, as ``eesd.model.quantize`` has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from eesd.common.checks import shown
from eesd.common.errors import EESDError
from eesd.common.json_input import Fields
from eesd.common.weights import BLOCKS, Quantization
from eesd.model.quantize import Quantized, dequantize, pack
from eesd.model.safetensors_file import CheckpointTensor

PARTS = ("qweight", "qzeros", "scales", "g_idx")
"""Suffixes of the tensors that replace ``weight``."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each of the 8 levels in an int32, from the lowest bits on."""
_NO_EFFECT = frozenset(
    (
        *("backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment", "damp_percent"),
        *(
            "dataset",
            "disable_exllama",
            "do_fuse",
            "exllama_config",
            "fuse_max_seq_len",
            "max_input_length",
            "meta",
            "model_file",
        ),
        *("model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "modules_to_fuse"),
        *("modules_in_block_to_quantize", "modules_to_not_convert", "mse", "pad_token_id", "quantizer", "static_groups"),
        *("lm_head", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama"),
    )
)
"""Fields that say how levels were found, what computes with them, or which layers have them, which the tensors say as well."""


@dataclass(frozen=True)
class Packing:
    """How a checkpoint stores its quantized weights.

    Attributes:
        method: ``gptq`` or ``awq``.
        bits: 4 or 8.
        group: Number of consecutive inputs that share a scale; None: all inputs of an output.
        symmetric: Whether every zero point is the middle of the range.
        offset: What must be added to a stored zero point.
        unknown: Names of fields that nobody knows.
    """

    method: str
    bits: int
    group: int | None
    symmetric: bool
    offset: int
    unknown: tuple[str, ...] = ()

    def quantization(self, widths: set[int]) -> Quantization:
        """The quantization of an engine directory with these levels. A scale may be repeated for several blocks.

        Args:
            widths: The numbers of inputs of all quantized weights.

        Raises:
            EESDError: A scale is for all inputs, and their number is not a multiple of 32.
        """
        block = gcd(*widths) if self.group is None else self.group
        kind = f"int{self.bits}" if self.symmetric else f"uint{self.bits}"
        fitting = [size for size in BLOCKS if block % size == 0]
        if not fitting:
            raise EESDError(f"A quantized weight has a number of inputs that is no multiple of {min(BLOCKS)}; not supported.")
        return Quantization(kind, max(fitting))


def read_packing(raw: Any) -> Packing:
    """Read ``quantization_config``.

    Raises:
        ValueError: The method or one of its options is not supported.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"quantization_config is {shown(raw)}, and must be an object")
    fields = Fields(raw)
    method = fields.take("quant_method", None)
    if method not in ("gptq", "awq"):
        raise ValueError(
            f"quantization_config has the method {shown(method)}; supported are gptq and awq, or unquantized weights"
        )
    bits, group = fields.integer("bits"), fields.take("group_size", 128)
    if bits not in ((4, 8) if method == "gptq" else (4,)):
        raise ValueError(f"quantization_config has {shown(bits)} bits, which is not supported for {method}")
    if type(group) is not int or (group != -1 and (group < 1 or group % min(BLOCKS))):
        raise ValueError(f"quantization_config has group_size {shown(group)}; supported are -1 and multiples of {min(BLOCKS)}")
    symmetric, offset = (_gptq if method == "gptq" else _awq)(fields)
    if bits == 8 and not symmetric:
        raise ValueError("quantization_config has 8 bits with zero points (sym is false), which is not supported")
    unknown = tuple(name for name in fields.left if name not in _NO_EFFECT)
    return Packing(method, bits, None if group == -1 else group, symmetric, offset, unknown)


def _gptq(fields: Fields) -> tuple[bool, int]:
    layouts = {name: fields.text(name) for name in ("checkpoint_format", "format")}
    layout = layouts["checkpoint_format"] or layouts["format"] or "gptq"
    if layout not in ("gptq", "gptq_v2") or fields.flag("is_marlin_format"):
        raise ValueError(f"quantization_config has the layout {shown(layout)}; supported are gptq and gptq_v2")
    if fields.take("dynamic", None):
        raise ValueError("quantization_config has dynamic options, which differ between layers; they are not supported")
    if fields.text("pack_dtype") not in (None, "int32"):
        raise ValueError("quantization_config has a pack_dtype other than int32, which is not supported")
    fields.flag("desc_act")  # what it means for a weight is in its g_idx, which is checked
    return fields.flag("sym", True), 0 if layout == "gptq_v2" else 1


def _awq(fields: Fields) -> tuple[bool, int]:
    version = fields.text("version") or "gemm"
    if version.lower() != "gemm":
        raise ValueError(f"quantization_config has the version {shown(version)}; supported is gemm")
    if not fields.flag("zero_point", True):
        raise ValueError("quantization_config has zero_point false, which is not supported for awq")
    return False, 0


class PackedTensor:
    """A weight that is stored as levels, zero points and scales.

    Args:
        name: Name of the weight.
        parts: Its tensors by suffix.
        packing: How they are stored.

    Attributes:
        shape: [out, in].
        dtype: Element type of the dequantized weight.

    Raises:
        EESDError: A tensor is missing or has another shape, or the groups are not consecutive inputs.
    """

    dtype = torch.float32

    def __init__(self, name: str, parts: Mapping[str, CheckpointTensor], packing: Packing) -> None:
        self.name, self._parts, self._packing = name, parts, packing
        per = 32 // packing.bits
        missing = [part for part in PARTS[:3] if part not in parts]
        if missing:
            raise EESDError(f"The checkpoint has no tensor {name}.{missing[0]}; it is incomplete, fetch it again.")
        qweight, qzeros, scales = (parts[part] for part in PARTS[:3])
        shapes = [part.shape for part in (qweight, qzeros, scales)]
        rows, columns = shapes[0] if len(shapes[0]) == 2 else (0, 0)
        inputs, outputs = (rows * per, columns) if packing.method == "gptq" else (rows, columns * per)
        groups = 1 if packing.group is None else inputs // packing.group
        if not inputs or (packing.group and inputs % packing.group) or outputs % per:
            raise EESDError(
                f"{qweight.path}: {name}.qweight has a shape that is no whole number of groups; it is not supported."
            )
        if shapes[1:] != [(groups, outputs // per), (groups, outputs)] or (qweight.stored, qzeros.stored) != ("I32", "I32"):
            raise EESDError(f"{qweight.path}: the tensors of {name} do not fit config.json's quantization_config.")
        self.shape = (outputs, inputs)
        if "g_idx" in parts:
            index = torch.frombuffer(parts["g_idx"].read_bytes(), dtype=torch.int32)
            if not torch.equal(index, torch.arange(inputs, dtype=torch.int32) // (inputs // groups)):
                raise EESDError(
                    f"{qweight.path}: the groups of {name} are not consecutive inputs (desc_act); give a checkpoint that was "
                    "quantized with desc_act false."
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors in the checkpoint."""
        return sum(part.nbytes for part in self._parts.values())

    def head(self) -> bytes:
        """The first kilobyte of levels and of scales, for the fingerprint."""
        return self._parts["qweight"].head() + self._parts["scales"].head()

    def read(self) -> Tensor:
        """The dequantized weight [out, in] in float32."""
        return dequantize(self._quantized(torch.float32, 1), self._kind).t()

    def levels(self, quantization: Quantization, dtype: torch.dtype) -> Quantized | None:
        """The levels as they are, if the quantization has the same type and groups that are no larger.

        Args:
            quantization: The wanted quantization.
            dtype: Element type of the scales to return.
        """
        group = self.shape[1] // self._parts["scales"].shape[0]
        if quantization.weights != self._kind or quantization.minimums or group % quantization.block:
            return None
        return self._quantized(dtype, group // quantization.block)

    @property
    def _kind(self) -> str:
        return f"{'' if self._packing.symmetric else 'u'}int{self._packing.bits}"

    def _quantized(self, dtype: torch.dtype, repeat: int) -> Quantized:
        """Each scale is repeated for as many blocks as ``repeat``."""
        bits, gptq = self._packing.bits, self._packing.method == "gptq"
        outputs, inputs = self.shape
        words = torch.frombuffer(self._parts["qweight"].read_bytes(), dtype=torch.uint8)
        levels = (_fields(words, bits).view(-1, outputs, 32 // bits).transpose(1, 2) if gptq else _awq_order(words)).reshape(
            inputs, outputs
        )
        words = torch.frombuffer(self._parts["qzeros"].read_bytes(), dtype=torch.uint8)
        zeros = (_fields(words, bits) if gptq else _awq_order(words)).view(-1, outputs) + self._packing.offset
        scales = self._parts["scales"].read().to(dtype)
        if self._packing.symmetric and bool((zeros != 1 << (bits - 1)).any()):
            raise EESDError(f'{self.name} has zero points, but config.json says "sym": true; set it to false there.')
        if not torch.isfinite(scales).all():
            raise EESDError(f"The scales of {self.name} do not fit {str(dtype).removeprefix('torch.')}; give another --dtype.")
        if int(zeros.max()) >= 1 << bits:
            raise EESDError(f"{self.name} has a zero point that does not fit {bits} bits, which programs read differently.")
        if self._packing.symmetric:
            levels ^= 1 << (bits - 1)  # the two's complement of the level minus the middle
        scales, zeros = (part.repeat_interleave(repeat, 0) for part in (scales, zeros))
        return Quantized(pack(levels, bits), scales, None if self._packing.symmetric else pack(zeros, bits))


def _fields(words: Tensor, bits: int) -> Tensor:
    """The values of little-endian integers, from the lowest bits on, as bytes."""
    return words.clone() if bits == 8 else torch.stack((words & 15, words >> 4), -1).view(-1)


def _awq_order(words: Tensor) -> Tensor:
    """The values of little-endian int32 in AWQ's order, as bytes."""
    values = torch.empty(len(words) // 4, 8, dtype=torch.uint8)
    values[:, _AWQ_ORDER] = _fields(words, 4).view(-1, 8)
    return values.view(-1)
