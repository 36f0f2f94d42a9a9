"""Record the signatures of a real TensorRT Python module, so that the fake cannot drift from it.

    python tests/support/trt_signatures.py MODULE [DIRECTORY]

It writes ``<name>-<version>.json``, which has the classes that this project uses, as pybind11
describes them. The committed files are in ``tests/data/tensorrt_api``. The module need not run, so
no GPU is needed. ``tensorrt_rtx`` can be imported as installed. For TensorRT, the PyPI wheel
``tensorrt_cu13_bindings`` is enough: it is one shared object that needs three libraries and a few C
functions, which empty ones can replace:

    pip download --no-deps tensorrt_cu13_bindings==10.15.1.* && unzip tensorrt_cu13_bindings-*.whl
    nm -D --undefined-only tensorrt_bindings/tensorrt.so | awk '/INTERNAL|PluginRegistry|OnnxParserVersion|initLib/ {print "void *" $2 "(void){return 0;}"}' > empty.c
    for lib in nvinfer nvinfer_plugin nvonnxparser; do gcc -shared -fPIC -Wl,-soname,lib$lib.so.10 -o lib$lib.so.10 empty.c; done
    LD_LIBRARY_PATH=. PYTHONPATH=. python tests/support/trt_signatures.py tensorrt_bindings
"""  # noqa: E501

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "tensorrt_api"
CLASSES = (
    *(
        "ILogger",
        "Runtime",
        "ICudaEngine",
        "IExecutionContext",
        "IRuntimeConfig",
        "IRuntimeCache",
        "IHostMemory",
    ),
    *(
        "EngineInspector",
        "Builder",
        "IBuilderConfig",
        "IOptimizationProfile",
        "INetworkDefinition",
        "ILayer",
        "OnnxParser",
    ),
    *(
        "ITimingCache",
        "IStreamWriter",
        "IProgressMonitor",
        "IGpuAllocator",
        "Refitter",
        "OnnxParserRefitter",
    ),
)
ENUMS = (
    *(
        "ILogger.Severity",
        "ExecutionContextAllocationStrategy",
        "LayerInformationFormat",
        "ProfilingVerbosity",
        "BuilderFlag",
    ),
    *(
        "DynamicShapesKernelSpecializationStrategy",
        "NetworkDefinitionCreationFlag",
        "LayerType",
        "ComputeCapability",
    ),
)
SPECIAL = ("__init__", "__enter__", "__exit__")
"""Members with underscores that are part of the API."""
Api = dict[str, Any]


def signatures(module: ModuleType) -> Api:
    """Returns the signatures of those :data:`CLASSES` and :data:`ENUMS` that a module has."""
    classes = {name: _members(getattr(module, name)) for name in CLASSES if hasattr(module, name)}
    enums = {name: _enum(module, name) for name in ENUMS if hasattr(module, name.split(".")[0])}
    return {"version": module.__version__, "classes": classes, "enums": enums}


def _members(cls: type) -> dict[str, list[str]]:
    """Returns the signatures of each method and property. A method has a signature for each
    overload. Methods that add a layer are left out."""
    names = {name for base in cls.__mro__ if base.__module__ != "builtins" for name in vars(base)}
    public = [
        name for name in sorted(names) if name in SPECIAL or not name.startswith(("_", "add_"))
    ]
    found = {name: _signatures(cls, name) for name in public}
    return {name: described for name, described in found.items() if described}


def _signatures(cls: type, name: str) -> list[str]:
    member = inspect.getattr_static(cls, name)
    if isinstance(member, property):
        kind = "property" if member.fset is None else "settable property"
        return [
            (
                f"{kind} -> "
                f"{_plain(member.fget.__doc__ or '').rpartition('-> ')[2].strip() or 'object'}"
            )
        ]
    if inspect.isfunction(member):  # this is Python code of the wheel
        return [f"({', '.join(inspect.signature(member).parameters)}) -> object"]
    if not callable(getattr(cls, name)):
        return []  # members of a nested enum are also on the class
    lines = [
        line.partition(". ")[2] if line[:1].isdigit() else line
        for line in _plain(member.__doc__ or "").splitlines()
    ]
    return [line.removeprefix(name) for line in lines if line.startswith(f"{name}(self")]


def _plain(doc: str) -> str:
    """Remove the names of modules from a docstring."""
    return re.sub(
        r"\b(?:typing|typing_extensions|nvinfer1|collections\.abc|(?:\w+\.)?tensorrt\w*)(?:\.|::)",
        "",
        doc,
    )


def _enum(module: ModuleType, name: str) -> str:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return " ".join(found.__members__)


def to_json(api: Api) -> str:
    """Returns the text of the JSON file for an API."""
    return json.dumps(api, indent=1) + "\n"


def main(module: str, directory: str = str(DATA)) -> None:
    api = signatures(importlib.import_module(module))
    name = "rtx" if "rtx" in module else "tensorrt"
    path = Path(directory) / f"{name}-{api['version']}.json"
    path.write_text(to_json(api))
    print(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
