"""If TensorRT is installed, build plans, and check their bits and the tokens of every way to
draft."""

import importlib.util
import shutil
from typing import Any

from eesd.common.manifest import load_manifest
from eesd.runtime.engines.backends import EngineOptions, open_engines
from eesd.runtime.engines.exactness import Exactness
from eesd.runtime.engines.trt_plans import FLAVOURS
from lab.lease import Lease
from lab.lease.equality import WAYS, compared, exported
from lab.lease.probes import command


def plans(lease: Lease) -> dict[str, Any]:
    """Check plans of each installed flavour and each number of stages. Without a GPU, plans are
    only built."""
    found: dict[str, Any] = {}
    for flavour, module in FLAVOURS.items():
        if importlib.util.find_spec(module) is None or (flavour == "tensorrt" and not lease.on_gpu):
            found[flavour] = (
                "it is not installed"
                if importlib.util.find_spec(module) is None
                else "it builds on a GPU only"
            )
            continue
        for stages in (1, 2):
            found[f"{flavour}, {stages} stages"] = _flavour(lease, flavour, stages)
    return found


def _flavour(lease: Lease, flavour: str, stages: int) -> dict[str, Any]:
    directory = lease.output / f"{flavour}-{stages}"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(exported(lease, "float16", stages), directory)
    built = command(
        "eesd.export.build", directory, "--target", flavour, *(["--check"] if lease.on_gpu else [])
    )
    manifest = load_manifest(directory)
    fused = {
        name: [plan.fused_attentions, plan.fused_cache_updates]
        for name, plan in manifest.plans.items()
    }
    found: dict[str, Any] = {"built": built, "fused attentions and updates": fused}
    if not lease.on_gpu:
        return found
    checked = Exactness(manifest)
    checked.check(open_engines(directory, manifest, EngineOptions("tensorrt", None, False)).verify)
    found |= {"chains": str(checked.chains), "trees": str(checked.trees)}
    found |= {
        way: compared(directory, "tensorrt", dict(options), 120) for way, options in WAYS.items()
    }
    return found | {"long text": compared(directory, "tensorrt", {}, 700)}
