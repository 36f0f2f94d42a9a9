"""The packages that bring ONNX Runtime. They write the same files, so only one of them may be installed."""

import importlib

from eesd.common.errors import EESDError
from eesd.common.machine import installed

PACKAGES = ("onnxruntime", "onnxruntime-gpu")
"""For the CPU, and for NVIDIA GPUs and the CPU."""
FOR_GPUS = f"pip uninstall -y {' '.join(PACKAGES)}; pip install onnxruntime-gpu"


def onnxruntime_versions() -> dict[str, str]:
    """The installed packages and their versions; packages of other names, such as a build of one's own, are not seen."""
    found = {package: installed(package) for package in PACKAGES}
    return {package: version for package, version in found.items() if version is not None}


def onnxruntime_problem() -> str:
    """Why ONNX Runtime cannot be used, with the remedy; "" if it can."""
    versions = onnxruntime_versions()
    if len(versions) > 1:
        names = " and ".join(f"{package} {version}" for package, version in versions.items())
        return f"{names} are both installed, and overwrite each other's files; run: {FOR_GPUS} (for the CPU alone: onnxruntime)"
    try:
        importlib.import_module("onnxruntime").get_available_providers()
    except (ImportError, AttributeError) as error:  # removing one of two packages leaves a module without names
        package = next(iter(versions), PACKAGES[0])
        return f"onnxruntime cannot be loaded ({error}); run: pip install --force-reinstall {package}"
    return ""


def check_onnxruntime() -> None:
    """Raise :class:`EESDError` if ONNX Runtime cannot be used."""
    problem = onnxruntime_problem()
    if problem:
        raise EESDError(f"The ort backend cannot run: {problem}.")
