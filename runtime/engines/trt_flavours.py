"""The flavours of TensorRT: which version is installed, and which GPUs it has kernels for."""

import importlib
from typing import Any

from eesd.common.errors import EESDError
from eesd.common.manifest import FLAVOURS, Manifest
from eesd.common.weights import FP4, FP8

TURING = "7.5"
"""The oldest compute capability with kernels. It has none for bfloat16 and int4: builds end in an error of a compiler."""

_LEAST = {FP8: "8.9", FP4: "10.0"}
"""The oldest compute capability with kernels for levels that only some GPUs know."""


def library_version(flavour: str) -> str:
    """Version of the installed library.

    The module is asked, not the package: ``tensorrt``, ``tensorrt-cu12`` and ``tensorrt-cu13`` bring one module.
    """
    return str(importlib.import_module(FLAVOURS[flavour]).__version__)


def supported_capabilities(flavour: str) -> tuple[str, ...]:
    """The compute capabilities that the installed TensorRT-RTX has kernels for.

    Empty for TensorRT: it builds only on the GPU that will run the plans, and says there if it cannot.
    """
    if flavour == "tensorrt":
        return ()
    known: Any = importlib.import_module(FLAVOURS[flavour]).ComputeCapability.__members__
    return tuple(f"{name[2:-1]}.{name[-1]}" for name in known if name.startswith("SM"))


def capabilities_for(flavour: str, manifest: Manifest) -> tuple[str, ...]:
    """The compute capabilities that TensorRT-RTX builds a directory's plans for unless it is told otherwise.

    Empty: its own choice, which is all but the oldest.
    """
    least = [_LEAST[one.weights] for one in manifest.quantization.used if one.weights in _LEAST]
    if not least:
        return ()
    return tuple(one for one in supported_capabilities(flavour) if _number(one) >= max(map(_number, least)))


def _number(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


def check_gpu_supported(flavour: str, capability: str, manifest: Manifest) -> None:
    """Raise :class:`EESDError` if ``flavour`` has no kernels for a directory's plans on GPUs of this compute capability."""
    known = supported_capabilities(flavour)
    if known and capability not in known:
        raise EESDError(
            f"{flavour} {library_version(flavour)} has no kernels for compute capability {capability}; "
            f"supported are {', '.join(known)}. Data-centre GPUs (H100: 9.0, B200: 10.0) need tensorrt: on a machine with one, "
            "pip install 'eesd[tensorrt]', and build with: eesd-build --target tensorrt. Other GPUs: --backend torch."
        )
    for one in manifest.quantization.used:
        least = _LEAST.get(one.weights, capability)
        if _number(capability) < _number(least):
            raise EESDError(
                f"TensorRT has no kernels for {one.name} weights on GPUs of compute capability {capability}, only from {least} "
                "on; export with --quantize int8 or int4."
            )
    int4 = any(one.weights == "int4" for one in manifest.quantization.used)
    if capability == TURING and (int4 or manifest.dtype == "bfloat16"):
        raise EESDError(
            f"TensorRT has no kernels for {'int4 weights' if int4 else manifest.dtype} on GPUs of compute capability {TURING}; "
            "export with --dtype float16, without --quantize or with --quantize int8."
        )
