"""``eesd-doctor`` reports the installed packages, the jobs that this machine can run, and the
packages that other jobs need."""

import json
from pathlib import Path

import click

from eesd.common import cli, machine, machine_report
from eesd.common.files import user_cache
from eesd.common.machine import installed, pip_install
from eesd.common.manifest import load_manifest
from eesd.common.terminal import Console, Table
from eesd.runtime.engines.backends import (
    FOR_GPUS,
    EngineOptions,
    onnxruntime_problem,
    onnxruntime_versions,
    open_engines,
)
from eesd.runtime.engines.cpu_build import describe_build, find_build
from eesd.runtime.engines.exactness import Exactness
from eesd.runtime.engines.trt_plans import FLAVOURS, library_version, supported_capabilities

PACKAGES = (
    ("eesd", ""),
    ("numpy", ""),
    ("onnxruntime", ""),
    ("tokenizers", ""),
    ("onnx", "export"),
    ("ml_dtypes", "export"),
    ("safetensors", "export"),
    ("gguf", "export"),
    ("huggingface_hub", "export"),
    ("torch", "torch"),
    ("accelerate", "distill"),
    ("tensorrt", "tensorrt"),
    ("tensorrt-rtx", "tensorrt-rtx"),
)
"""The names of packages, and of the extras that install them. The extra is "" for packages that
every installation has."""


@cli.command()
@click.option(
    "--engine-dir",
    type=cli.PATH,
    help="Also check whether drafting keeps every bit of this engine directory's logits.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(engine_dir: Path | None, as_json: bool) -> None:
    """Show versions, the processor and the GPU, and whether this machine can do each job."""
    facts = {
        "packages": packages(),
        "machine": machine_report.describe() | {"cache of models": _cache()},
        "jobs": jobs(),
    }
    if engine_dir is not None:
        facts["engines"] = engines(engine_dir)
    if as_json:
        click.echo(json.dumps(facts))
        return
    console = Console()
    for title, rows in facts.items():
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in rows.items():
            table.add_row(name, value)
        console.print(table)


def engines(directory: Path) -> dict[str, str]:
    """Report whether a directory's logits have the same bits on this machine for every number of
    tokens per call."""
    manifest = load_manifest(directory)
    opened = open_engines(directory, manifest, EngineOptions("auto", None, draft=False))
    exactness = Exactness(manifest)
    exactness.check_quickly(opened.verify)
    found = {
        "logits of calls of different sizes": str(exactness.chains),
        "files": f"as written, by samples; eesd-inspect {directory} --verify hashes them whole",
    }
    build = find_build(directory, manifest)
    if build:
        found["build for the CPU"] = describe_build(build)
    if opened.notice:
        found["note"] = opened.notice
    return found


def packages() -> dict[str, str]:
    """Report the version of each package, or the command that installs it."""
    missing = {
        name: f"not installed: {pip_install(extra)}" if extra else "missing"
        for name, extra in PACKAGES
    }
    found = {name: installed(name) or remedy for name, remedy in missing.items()}
    named = onnxruntime_versions().items()
    onnxruntime = [
        version if package == "onnxruntime" else f"{version} of {package}"
        for package, version in named
    ]
    found["onnxruntime"] = ", ".join(onnxruntime) or missing["onnxruntime"]
    return found | {flavour: _tensorrt(flavour) or missing[flavour] for flavour in FLAVOURS}


def jobs() -> dict[str, str]:
    """Report ``yes`` or the packages to install for each job. Each backend is checked
    separately."""
    torch = _missing(pip_install("torch"), *machine.TORCH_ENGINE)
    exporting = _missing(
        pip_install("export"), *(name for name, extra in PACKAGES if extra == "export")
    )
    found = {
        "run on the CPU (ort)": _ort_lacks() or _ort_types(),
        "own operators": _operators(),
        "run on the CPU (torch)": torch or "yes, engines of every type",
        "run on a GPU (ort)": _ort_lacks()
        or torch
        or _gpu_lacks()
        or _ort_gpu_lacks()
        or "yes, engines of every type",
        "run on a GPU (torch)": torch or _gpu_lacks() or "yes, engines of every type",
    }
    for flavour in FLAVOURS:
        plans = _plans_lack(flavour, "torch") or _gpu_lacks() or _kernels_lack(flavour)
        found[f"run plans on a GPU ({flavour})"] = plans or "yes"
    for flavour in FLAVOURS:
        found[f"build plans ({flavour})"] = (
            _plans_lack(flavour, "onnx") or _building_lacks(flavour) or "yes"
        )
    return found | {"export": exporting or "yes"}


def _cache() -> str:
    """The directory to which ``--model`` exports."""
    place = user_cache()
    if place is None:
        return "none: this user has no home; set EESD_CACHE_DIR"
    return f"{place}; eesd-cache list shows it"


def _missing(remedy: str, *names: str) -> str:
    """Return the missing packages, and the command that installs them. The result is "" if all
    packages are installed."""
    missing = [name for name in names if not installed(name)]
    return f"no: {', '.join(missing)} missing; {remedy}" if missing else ""


def _ort_lacks() -> str:
    others = (name for name, extra in PACKAGES if not extra and name != "onnxruntime")
    problem = onnxruntime_problem()
    return _missing(pip_install(), *others) or (f"no: {problem}" if problem else "")


def _ort_types() -> str:
    """The engine types that ONNX Runtime runs on the CPU."""
    from eesd.runtime.engines import operators

    own = not operators.missing()
    return "yes, engines of every type" if own else "yes, but float32 engines alone, and slowly"


def _ort_gpu_lacks() -> str:
    from onnxruntime import get_available_providers

    if "CUDAExecutionProvider" in get_available_providers():
        return ""
    return f"no: the installed ONNX Runtime is for the CPU; {FOR_GPUS}"


def _operators() -> str:
    """Report the operator kernels for this processor. If there are none, report the reason and the
    remedy."""
    if onnxruntime_problem():
        return "no: they run in ONNX Runtime"
    from eesd.runtime.engines import operators

    if not operators.missing():
        return f"yes, {operators.fastest()} kernels"
    if not operators.LIBRARY.exists():
        return f"no: not built, so models run 2 to 6 times slower; {operators.build_remedy()}"
    if operators.missing() == operators.SLOW:
        return (
            "no: this processor has neither AVX2 nor AVX-512, so ONNX Runtime's own operators run "
            "models"
        )
    return (
        f"no: {operators.LIBRARY.name} cannot be loaded on this system; {operators.build_remedy()}"
    )


def _tensorrt(flavour: str) -> str:
    """Return the version of a flavour of TensorRT, or "" if it is not installed."""
    try:
        return library_version(flavour)
    except ModuleNotFoundError:
        return ""
    except (ImportError, OSError) as error:  # the module loads shared libraries
        return f"cannot be loaded: {error}"


def _plans_lack(flavour: str, *others: str) -> str:
    """Return the missing packages that a flavour's plans need. They need the flavour's library and
    ``others``."""
    version = _tensorrt(flavour)
    remedy = pip_install(flavour)
    if version.startswith("cannot"):
        return f"no: {flavour} {version}; pip install --force-reinstall {flavour}"
    missing = [*([] if version else [flavour]), *(name for name in others if not installed(name))]
    return f"no: {', '.join(missing)} missing; {remedy}" if missing else ""


def _gpu_lacks() -> str:
    if not machine.nvidia_driver():
        return "no: there is no NVIDIA driver"
    if machine.torch_sees_gpu():
        return ""
    return (
        "no: the installed torch sees no GPU; install a build for the driver's CUDA (pytorch.org)"
    )


def _kernels_lack(flavour: str) -> str:
    known = supported_capabilities(flavour)
    here = machine_report.compute_capability()
    if known and here not in known:
        return f"no: it has no kernels for compute capability {here}; use tensorrt"
    return ""


def _building_lacks(flavour: str) -> str:
    if flavour == "tensorrt" and machine_report.compute_capability() is None:
        return "no: it needs the GPU that will run the plans"
    return ""


if __name__ == "__main__":
    main()
