"""Quantized weights of a checkpoint. Their levels are either kept or dequantized.

A level ``q`` stands for the weight ``scale * (q - zero_point)``. An int32 holds p levels of
``32 / p`` bits. The first level has the lowest bits. An unsigned level is the signed level plus the
middle of the range. The tensors of a linear layer depend on the layout:

* GPTQ has ``qweight`` [in / p, out] (packed along the inputs), ``qzeros`` [groups, out / p] (packed
  along the outputs), ``scales`` [groups, out], and ``g_idx`` [in] (the group of each input).
  ``qzeros`` holds the zero point minus one, except in the second format, which configs call
  ``gptq_v2`` or do not name.
* AWQ (gemm) has ``scales`` [groups, out], ``qweight`` [in, out / 8] and ``qzeros``
  [groups, out / 8]. The last two are packed along the outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7.
* compressed-tensors in the format pack-quantized has ``weight_packed`` [out, in / p],
  ``weight_scale`` [out, groups], ``weight_zero_point`` [out / p, groups] (packed along the
  outputs), and ``weight_g_idx`` [in]. The format int-quantized has ``weight`` [out, in] of signed
  bytes instead of ``weight_packed``.
* FP8 has ``weight`` [out, in] and a factor, which is called ``weight_scale`` or
  ``weight_scale_inv``. The factor is one number, one for each output [out, 1], or one for each
  block [out / rows, in / columns] (rounded up), whose size is in the config.
* NVFP4 has two levels in each byte [out, in / 2] (the first in the low half), and ``weight_scale``
  [out, in / 16] of FP8. The whole weight has a factor (``weight_scale_2`` of ModelOpt) or a divisor
  (``weight_global_scale`` of compressed-tensors).
* MXFP4 of gpt-oss has two tensors for all experts of a layer. ``NAME_blocks``
  [experts, out, in / 32, 16] holds levels as in NVFP4. ``NAME_scales`` [experts, out, in / 32]
  holds powers of two, which are stored as their exponents plus 127.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from math import gcd, prod

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.quantization import FP4, FP8, MXFP4, Quantization
from eesd.model.arrays import Array, all_finite, rounded, to_float32, transposed
from eesd.model.packing import AWQ, BYTES, FLOATS, GPTQ, NVFP4, OF_EXPERTS, WORDS, Packing
from eesd.model.quantized import Bytes, Quantized, fields, pack, unpack
from eesd.model.safetensors_file import CheckpointTensor

_SCALES = ("scales", "weight_scale", "weight_scale_inv")
_PARTS = {
    GPTQ: ("qweight", "scales", "qzeros", "g_idx"),
    AWQ: ("qweight", "scales", "qzeros"),
    WORDS: ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    BYTES: ("weight", "weight_scale", "weight_zero_point"),
    FLOATS: ("weight", "weight_scale", "weight_scale_inv", "weight_zero_point"),
    NVFP4: ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale"),
}
"""For each layout, the suffixes of the tensors that replace a weight."""
_OF_ACTIVATIONS = frozenset(
    f"{of}_{part}"
    for of in ("input", "activation", "output", "q", "k", "v")
    for part in ("scale", "zero_point", "global_scale", "scale_ub")
)
"""Suffixes of tensors for activations and caches, which are ignored."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of the 8 levels in an int32. The first level has the lowest bits."""
_SMALL = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}
"""8-bit types of scales."""


def packed_tensors(
    stored: Mapping[str, CheckpointTensor], packing: Packing
) -> dict[str, "CheckpointTensor | PackedTensor"]:
    """Return the tensors of a checkpoint, with one tensor for each quantized weight. Tensors for
    activations are left out.

    Raises:
        EESDError: No weight is quantized, or a weight is incomplete, has the wrong shape, or has
            tensors that are not supported.
    """
    if packing.layout == OF_EXPERTS:
        return _packed_experts(stored, packing)
    modules: dict[str, dict[str, CheckpointTensor]] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part not in _OF_ACTIVATIONS:
            modules.setdefault(module, {})[part] = tensor
    found: dict[str, CheckpointTensor | PackedTensor] = {}
    for module, parts in modules.items():
        if parts.keys() & {*_SCALES, "qweight", "weight_packed"}:
            own = {part: parts[part] for part in _PARTS[packing.layout] if part in parts}
            odd = min(parts.keys() - own.keys() - {"bias"}, default=None)
            if odd is not None:
                raise EESDError(
                    f"{parts[odd].path}: the tensor {parts[odd].name} is not supported for "
                    "weights of this layout."
                )
            found[f"{module}.weight"] = _CLASSES.get(packing.layout, PackedIntegers)(
                module, own, packing
            )
            parts = {"bias": parts["bias"]} if "bias" in parts else {}
        found |= {tensor.name: tensor for tensor in parts.values()}
    if not any(isinstance(tensor, PackedTensor) for tensor in found.values()):
        raise EESDError(
            "config.json has a quantization_config, but no weight is quantized; remove the "
            "field, or fetch again."
        )
    return found


def _packed_experts(
    stored: Mapping[str, CheckpointTensor], packing: Packing
) -> dict[str, "CheckpointTensor | PackedTensor"]:
    """Return the tensors of a checkpoint with MXFP4 weights. Each tensor of all experts is split.
    ``mlp.experts.down_proj_blocks`` gives ``mlp.experts.0.down_proj.weight`` and so on."""
    found: dict[str, CheckpointTensor | PackedTensor] = {}
    for name, levels in stored.items():
        module = name.removesuffix("_blocks")
        if module == name:
            if f"{name.removesuffix('_scales')}_blocks" not in stored:
                found[name] = levels
            continue
        scales = stored.get(f"{module}_scales")
        if scales is None:
            raise EESDError(
                f"The checkpoint has no tensor {module}_scales; it is incomplete, fetch it again."
            )
        if len(levels.shape) != 4 or levels.shape[3] != 16 or scales.shape != levels.shape[:3]:
            raise EESDError(
                f"{levels.path}: the tensors {name} and {module}_scales do not fit each other."
            )
        count, outputs, blocks, size = levels.shape
        levels = replace(levels, shape=(count * outputs, blocks * size))
        scales = replace(scales, shape=(count * outputs, blocks))
        before, _, last = module.rpartition(".")
        for expert in range(count):
            rows = expert * outputs, (expert + 1) * outputs
            parts = {"weight_packed": levels.rows(*rows), "weight_scale": scales.rows(*rows)}
            own = f"{before}.{expert}.{last}"
            found[f"{own}.weight"] = PackedMxfp4(own, parts, packing)
    if not any(isinstance(tensor, PackedTensor) for tensor in found.values()):
        raise EESDError(
            "config.json has a quantization_config, but no weight is quantized; remove the "
            "field, or fetch again."
        )
    return found


class PackedTensor:
    """A weight stored as levels and scales.

    Args:
        name: Name of the linear layer.
        parts: Tensors of the layer by suffix.
        packing: Layout of the tensors.

    Attributes:
        shape: [out, in].
        dtype: Element type of the dequantized weight.
        quantization: The quantization that keeps the levels of this tensor alone. It is None if
            either all linear weights or none of them keep their levels.

    Raises:
        EESDError: A tensor is missing or has another shape.
    """

    dtype = "float32"
    shape: tuple[int, ...]
    quantization: Quantization | None = None

    def __init__(self, name: str, parts: Mapping[str, CheckpointTensor], packing: Packing) -> None:
        self.name = name
        self._parts = parts
        self._packing = packing
        self._order: NDArray[np.int64] | None = None
        self._levels_part, self._scales_part = (
            self._part("qweight", "weight_packed", "weight"),
            self._part(*_SCALES),
        )
        if 0 in self._levels_part.shape or len(self._levels_part.shape) != 2:
            raise self._misfit()
        self.shape = self._shape()

    def _part(self, *names: str) -> CheckpointTensor:
        """Return the tensor with one of these suffixes."""
        found = next((name for name in names if name in self._parts), None)
        if found is None:
            missing = next(
                (name for name in names if name in _PARTS[self._packing.layout]), names[-1]
            )
            raise EESDError(
                f"The checkpoint has no tensor {self.name}.{missing}; it is incomplete, fetch "
                "it again."
            )
        return self._parts[found]

    def _misfit(self) -> EESDError:
        path = self._levels_part.path
        return EESDError(
            f"{path}: the tensors of {self.name} do not fit config.json's quantization_config."
        )

    def _shape(self) -> tuple[int, int]:
        """Return the shape of the weight. Raises EESDError if the tensors do not fit each other."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Number of bytes that its tensors have in the checkpoint."""
        return sum(part.nbytes for part in self._parts.values())

    def head(self) -> bytes:
        """The first kilobyte of levels and of scales, for the fingerprint."""
        return self._levels_part.head() + self._scales_part.head()

    def rows(self, order: NDArray[np.int64]) -> "PackedTensor":
        """Return the rows of the weight for these outputs, in this order."""
        found = copy(self)
        found._order = order if self._order is None else self._order[order]
        found.shape = (len(order), self.shape[1])
        return found

    def read(self) -> NDArray[np.float32]:
        """Read the dequantized weight [out, in] in float32."""
        values = self._levels_part.checked(self._values())
        return values if self._order is None else values[self._order]

    def _values(self) -> NDArray[np.float32]:
        """Return the whole dequantized weight [out, in] in float32."""
        raise NotImplementedError

    def fits(self, quantization: Quantization) -> bool:
        """Whether this quantization can keep the levels."""
        return False

    def levels(self, quantization: Quantization, dtype: str) -> Quantized | None:
        """Return the stored levels if they fit the quantization.

        Args:
            quantization: The wanted quantization.
            dtype: Element type of the scales to return.
        """
        if not self.fits(quantization):
            return None
        levels, scales, zeros = self._stored(quantization.block)
        order = slice(None) if self._order is None else self._order
        scales = np.ascontiguousarray(rounded(scales[:, order], dtype))
        if not all_finite(scales):
            raise EESDError(f"The scales of {self.name} do not fit {dtype}; give another --dtype.")
        zeros = None if zeros is None else pack(zeros[:, order], self._packing.bits)
        return Quantized(pack(transposed(levels.T[order]), self._packing.bits), scales, zeros)

    def _stored(self, block: int) -> tuple[Bytes, Array, Bytes | None]:
        """Return the levels [in, out] as bytes, and the scales and zero points of all blocks (each
        [in / block, out])."""
        raise NotImplementedError


class PackedIntegers(PackedTensor):
    """A weight stored as 4-bit or 8-bit integers."""

    def _shape(self) -> tuple[int, int]:
        layout = self._packing.layout
        per = 32 // self._packing.bits
        rows, columns = self._levels_part.shape
        if layout == BYTES:
            outputs = rows
            inputs = columns
        elif layout in (GPTQ, AWQ):
            outputs, inputs = (columns, rows * per) if layout == GPTQ else (columns * per, rows)
        else:
            outputs = rows
            inputs = columns * per
            if "weight_shape" in self._parts:
                inputs = self._stored_width(inputs)
        group = self._packing.group or inputs
        self._groups = inputs // group
        if self._levels_part.stored != ("I8" if layout == BYTES else "I32") or inputs % group:
            raise self._misfit()
        zeros = self._parts.get("qzeros", self._parts.get("weight_zero_point"))
        shape = self._scales_part.shape
        if layout in (GPTQ, AWQ):
            fits = shape == (self._groups, outputs) and self._part("qzeros").shape == (
                self._groups,
                outputs // per,
            )
            fits &= outputs % per == 0 and self._part("qzeros").stored == "I32"
        else:
            fits = shape == (outputs, self._groups) or (
                self._packing.group is None and shape in ((), (1,), (outputs,))
            )
            known = {"I8": (outputs, self._groups), "I32": (-(-outputs // per), self._groups)}
            if zeros is not None:
                fits &= known.get(zeros.stored) == zeros.shape or zeros.shape in (
                    (),
                    (1,),
                    (outputs,),
                )
            elif not self._packing.symmetric:
                self._part("weight_zero_point")
        if not fits:
            raise self._misfit()
        self._index = self._group_index(inputs, group)
        return outputs, inputs

    def _stored_width(self, most: int) -> int:
        """Return the number of inputs in ``weight_shape``. It is needed because the last int32 of
        an output may hold fewer levels."""
        part = self._parts["weight_shape"]
        kind = {"I64": np.int64, "I32": np.int32}.get(part.stored)
        given = [] if kind is None else part.read_bytes().view(kind).tolist()
        if (
            len(given) != 2
            or given[0] != self._levels_part.shape[0]
            or not 0 <= most - given[1] < 32 // self._packing.bits
        ):
            raise self._misfit()
        return int(given[1])

    def _group_index(self, inputs: int, group: int) -> NDArray[np.int32] | None:
        """Return the group of each input [in], or None if groups are consecutive."""
        part = self._parts.get("g_idx", self._parts.get("weight_g_idx"))
        if part is None:
            return None
        index = part.read_bytes().view(np.int32) if part.stored == "I32" else np.zeros(0, np.int32)
        # -1 is the initial value in compressed-tensors.
        if len(index) == inputs and (index == -1).all():
            return None
        if len(index) != inputs or index.min() < 0 or index.max() >= self._groups:
            raise self._misfit()
        return None if np.array_equal(index, np.arange(inputs) // group) else index

    def fits(self, quantization: Quantization) -> bool:
        return (
            quantization.weights == self._packing.kind
            and not quantization.minimums
            and self._index is None
            and self.shape[1] // self._groups % quantization.block == 0
        )

    def _values(self) -> NDArray[np.float32]:
        levels, scales, zeros = self._grouped()
        index = self._index
        if index is None:
            index = (np.arange(self.shape[1]) // (self.shape[1] // self._groups)).astype(np.int32)
        if zeros is None:
            middle = 1 << (self._packing.bits - 1)
            values = to_float32(levels ^ middle) - np.float32(middle)
        else:
            values = to_float32(levels) - to_float32(zeros)[index]
        values *= to_float32(scales)[index]
        return values.T

    def _stored(self, block: int) -> tuple[Bytes, Array, Bytes | None]:
        levels, scales, zeros = self._grouped()
        repeat = self.shape[1] // self._groups // block
        return levels, scales.repeat(repeat, 0), None if zeros is None else zeros.repeat(repeat, 0)

    def _grouped(self) -> tuple[Bytes, Array, Bytes | None]:
        """Return the levels [in, out], and the scales and zero points (each [groups, out]). If
        there are no zero points, the levels are in two's complement."""
        layout = self._packing.layout
        bits = self._packing.bits
        inputs = self.shape[1]
        outputs = self._levels_part.shape[0]
        words = self._levels_part.read_bytes()
        if layout == GPTQ:
            outputs = self._levels_part.shape[1]
            levels = (
                _fields(words, bits)
                .reshape(-1, outputs, 32 // bits)
                .swapaxes(1, 2)
                .reshape(inputs, outputs)
            )
        elif layout == AWQ:
            outputs = self._levels_part.shape[1] * 8
            levels = _awq_order(words).reshape(inputs, outputs)
        elif layout == BYTES:
            levels = (words ^ np.uint8(128)).reshape(outputs, inputs).T
        else:
            levels = _fields(words, bits).reshape(outputs, -1)[:, :inputs].T
        scales = self._scales_part.read()
        zeros = self._zeros(outputs)
        if layout in (WORDS, BYTES):
            scales = np.broadcast_to(scales.reshape(-1, self._groups), (outputs, self._groups)).T
        if self._packing.symmetric:
            return levels ^ np.uint8(1 << (bits - 1)), scales, None
        return levels, scales, zeros

    def _zeros(self, outputs: int) -> Bytes | None:
        """Return the zero points [groups, out] of unsigned levels. For a symmetric weight, check
        that every zero point is the middle of the range, and return None."""
        layout = self._packing.layout
        bits = self._packing.bits
        middle = 1 << (bits - 1)
        part = self._parts.get("qzeros", self._parts.get("weight_zero_point"))
        if part is None:
            return None
        words = part.read_bytes()
        offset = self._packing.offset
        if part.stored != "I32":
            signed = words.view(np.int8).reshape(-1, self._groups)
            zeros = np.broadcast_to(signed, (outputs, self._groups)).T.astype(np.int16) + np.int16(
                middle
            )
        elif layout in (GPTQ, AWQ):
            zeros = (
                (_fields(words, bits) if layout == GPTQ else _awq_order(words))
                .reshape(-1, outputs)
                .astype(np.int16)
            )
        else:
            across = np.ascontiguousarray(words.view(np.int32).reshape(-1, self._groups).T).view(
                np.uint8
            )
            zeros = (
                _fields(across.reshape(-1), bits)
                .reshape(self._groups, -1)[:, :outputs]
                .astype(np.int16)
            )
        if self._packing.symmetric:
            # GPTQ's second format stores the middle itself for a symmetric weight. Some configs
            # name the first format instead.
            if not any((zeros == one).all() for one in {middle, middle - int(layout == GPTQ)}):
                raise EESDError(
                    f"{part.name} has zero points, but config.json says that there are none "
                    '("sym" or "symmetric": true); '
                    "fetch the checkpoint again, or give another one."
                )
            return None
        if offset and (zeros == middle).all():
            raise EESDError(
                f"{part.name} has the zero points of a symmetric weight, but config.json says "
                '"sym": false; programs read them '
                'differently. If the model was quantized with "sym": true, set it to true there.'
            )
        if int(zeros.max()) + offset >= 1 << bits:
            raise EESDError(
                f"{self.name} has a zero point that does not fit {bits} bits, which programs "
                "read differently."
            )
        return (zeros + np.int16(offset)).astype(np.uint8)


class PackedFloats(PackedTensor):
    """A weight stored as 8-bit floating-point numbers (e4m3)."""

    def _shape(self) -> tuple[int, int]:
        outputs, inputs = self._levels_part.shape
        shape = self._scales_part.shape
        rows = self._packing.rows
        columns = self._packing.group or inputs
        if prod(shape) == 1:
            rows = outputs
            columns = inputs
        elif shape in ((outputs,), (outputs, 1)):
            rows = 1
            columns = inputs
        elif shape != (-(-outputs // rows), -(-inputs // columns)):
            raise self._misfit()
        zeros = self._parts.get("weight_zero_point")
        if self._levels_part.stored != "F8_E4M3" or (zeros is not None and any(zeros.read_bytes())):
            raise self._misfit()
        self._rows = rows
        self._columns = columns
        return outputs, inputs

    def fits(self, quantization: Quantization) -> bool:
        block = quantization.block
        return quantization.weights == FP8 and gcd(self._columns, self.shape[1]) % block == 0

    def _scales(self, block: int) -> NDArray[np.float32]:
        """Return the scales [out, in / block]."""
        outputs, inputs = self._levels_part.shape
        scales = _scale_values(self._scales_part).reshape(
            -(-outputs // self._rows), -(-inputs // self._columns)
        )
        return scales[np.arange(outputs) // self._rows][
            :, np.arange(0, inputs, block) // self._columns
        ]

    def _values(self) -> NDArray[np.float32]:
        outputs, inputs = self._levels_part.shape
        block = gcd(self._columns, inputs)
        values = to_float32(unpack(self._levels_part.read_bytes(), FP8, outputs * inputs)).reshape(
            outputs, -1, block
        )
        values *= self._scales(block)[:, :, None]
        return values.reshape(outputs, inputs)

    def _stored(self, block: int) -> tuple[Bytes, Array, Bytes | None]:
        levels = self._levels_part.read_bytes().reshape(self._levels_part.shape)
        return levels.T, self._scales(block).T, None


class PackedFp4(PackedTensor):
    """An NVFP4 weight."""

    def _shape(self) -> tuple[int, int]:
        outputs = self._levels_part.shape[0]
        inputs = self._levels_part.shape[1] * 2
        self._factor = self._part("weight_scale_2", "weight_global_scale")
        fits = (
            self._levels_part.stored == "U8"
            and prod(self._factor.shape) == 1
            and self._scales_part.stored == "F8_E4M3"
        )
        if not fits or self._scales_part.shape != (outputs, inputs // 16) or inputs % 16:
            raise self._misfit()
        return outputs, inputs

    # A damaged factor is reported as non-finite values.
    @np.errstate(divide="ignore", invalid="ignore")
    def _values(self) -> NDArray[np.float32]:
        outputs = self._levels_part.shape[0]
        inputs = self.shape[1]
        factor = to_float32(self._factor.read()).reshape(())
        scales = _scale_values(self._scales_part)
        scales = scales * factor if "weight_scale_2" in self._parts else scales / factor
        values = to_float32(unpack(self._levels_part.read_bytes(), FP4, outputs * inputs)).reshape(
            outputs, -1, 16
        )
        values *= scales[:, :, None]
        return values.reshape(outputs, inputs)


class PackedMxfp4(PackedTensor):
    """An expert's weight, stored as MXFP4."""

    quantization = MXFP4

    def _shape(self) -> tuple[int, int]:
        outputs, width = self._levels_part.shape
        if {self._levels_part.stored, self._scales_part.stored} != {"U8"}:
            raise self._misfit()
        return outputs, 2 * width

    def fits(self, quantization: Quantization) -> bool:
        return quantization == MXFP4

    def _scales(self) -> NDArray[np.float32]:
        """Return the scales [out, in / 32]. The exponent 255 stands for NaN."""
        exponents = self._scales_part.read_bytes().astype(np.int32).reshape(self._scales_part.shape)
        scales = np.ldexp(np.float32(1), exponents - 127)
        return np.where(exponents == 255, np.float32(np.nan), scales).astype(np.float32)

    def _values(self) -> NDArray[np.float32]:
        scales = self._scales()
        count = scales.size * MXFP4.block
        levels = to_float32(unpack(self._levels_part.read_bytes(), FP4, count))
        values = levels.reshape(*scales.shape, MXFP4.block) * scales[:, :, None]
        return values.reshape(len(scales), -1)

    def _stored(self, block: int) -> tuple[Bytes, Array, Bytes | None]:
        scales = self._scales()
        levels = fields(self._levels_part.read_bytes()).reshape(len(scales), -1)
        return levels.T, scales.T, None


_CLASSES = {FLOATS: PackedFloats, NVFP4: PackedFp4}


def _scale_values(part: CheckpointTensor) -> NDArray[np.float32]:
    """Return the values of scales in float32. The stored scales may have 8 bits."""
    small = _SMALL.get(part.stored)
    if small is None:
        return to_float32(part.read())
    return part.checked(part.read_bytes().view(small).astype(np.float32).reshape(part.shape))


def _fields(words: Bytes, bits: int) -> Bytes:
    """Return the values that are packed in little-endian integers, one byte each. The first value
    has the lowest bits."""
    return words if bits == 8 else fields(words)


def _awq_order(words: Bytes) -> Bytes:
    """Return the values that are packed in little-endian int32 in AWQ's order, one byte each."""
    values = np.empty((len(words) // 4, 8), np.uint8)
    values[:, _AWQ_ORDER] = fields(words).reshape(-1, 8)
    return values.reshape(-1)
