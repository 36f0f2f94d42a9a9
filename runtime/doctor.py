"""``eesd-doctor``: what is installed, what can run here, and what to install for the rest."""

import json
from pathlib import Path

import click

from eesd.common import cli, machine
from eesd.common.machine import installed
from eesd.common.manifest_reader import load_manifest
from eesd.common.terminal import Console, Table
from eesd.runtime.engines.backends import open_engines
from eesd.runtime.engines.exactness import Exactness

PACKAGES = (
    ("eesd", ""),
    ("numpy", ""),
    ("onnxruntime", ""),
    ("tokenizers", ""),
    ("torch", "export"),
    ("transformers", "export"),
    ("onnx", "export"),
    ("onnxscript", "export"),
    ("safetensors", "export"),
    ("tensorrt", "tensorrt"),
    ("tensorrt-rtx", "tensorrt-rtx"),
)
"""Name, and the extra that installs it; "" for what every installation has."""


@cli.command()
@click.option("--engine-dir", type=cli.PATH, help="Also check whether drafting leaves every bit of this directory's logits.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(engine_dir: Path | None, as_json: bool) -> None:
    """Show versions, processor and GPU, and for each job whether this machine can do it."""
    facts = {"packages": packages(), "machine": machine.describe(), "jobs": jobs()}
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
    """Whether a directory's logits are the same bits here for every number of tokens in a call."""
    manifest = load_manifest(directory)
    opened = open_engines(directory, manifest, "auto", None, draft=False)
    exactness = Exactness(manifest)
    exactness.check_quickly(opened.verify)
    found = {"logits of calls of different sizes": str(exactness.chains)}
    return found | ({"note": opened.notice} if opened.notice else {})


def packages() -> dict[str, str]:
    """Version of each package, or the command that installs it."""
    missing = {name: f"not installed: pip install 'eesd[{extra}]'" if extra else "missing" for name, extra in PACKAGES}
    return {name: installed(name) or remedy for name, remedy in missing.items()}


def jobs() -> dict[str, str]:
    """For each job ``yes``, or what to install for it."""
    on_cpu = _missing("pip install eesd", *(name for name, extra in PACKAGES if not extra))
    torch = _missing("pip install 'eesd[torch]'", *machine.TORCH_ENGINE)
    exporting = _missing("pip install 'eesd[export]'", *(name for name, extra in PACKAGES if extra == "export"))
    return {
        "run on the CPU (ort)": on_cpu or f"yes, engines of every type in float32{_widening_lacks()}",
        "run on the CPU (torch)": torch or "yes, engines of every type",
        "run plans on a GPU (tensorrt)": _plans_lack("torch") or _gpu_lacks() or "yes",
        "run on a GPU (torch)": torch or _gpu_lacks() or "yes, engines of every type",
        "build plans": _plans_lack("onnx") or "yes",
        "export": exporting or "yes",
    }


def _missing(remedy: str, *names: str) -> str:
    """Which packages are missing, and the command that installs them; "" if all are there."""
    missing = [name for name in names if not installed(name)]
    return f"no: {', '.join(missing)} missing; {remedy}" if missing else ""


def _widening_lacks() -> str:
    return "" if installed("onnx") else "; for 16-bit engines: pip install onnx"


def _plans_lack(*others: str) -> str:
    """What is missing for plans: either flavour of TensorRT, and these packages."""
    missing = [name for name in others if not installed(name)]
    if not installed("tensorrt") and not installed("tensorrt-rtx"):
        missing.insert(0, "tensorrt or tensorrt-rtx")
    return f"no: {', '.join(missing)} missing; pip install 'eesd[tensorrt-rtx]' or 'eesd[tensorrt]'" if missing else ""


def _gpu_lacks() -> str:
    if not machine.nvidia_driver():
        return "no: there is no NVIDIA driver"
    if machine.torch_sees_gpu():
        return ""
    return "no: the installed torch sees no GPU; install a build for the driver's CUDA (pytorch.org)"


if __name__ == "__main__":
    main()
