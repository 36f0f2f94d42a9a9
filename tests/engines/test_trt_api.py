"""Tests that the fake of TensorRT and the code that uses TensorRT fit the real Python API of each
version."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import fake_tensorrt as fake
from support.trt_api import VERSIONS, Api, load, parameters
from support.trt_signatures import DATA, signatures, to_json

ALL = sorted(path.stem for path in DATA.glob("*.json"))
FLAVOUR = {version: flavour for flavour, versions in VERSIONS.items() for version in versions}
RTX_ONLY = {
    "IExecutionContext": {"is_stream_capturable"},
    "IRuntimeConfig": {
        "create_runtime_cache",
        "set_runtime_cache",
        "dynamic_shapes_kernel_specialization_strategy",
    },
    "IRuntimeCache": {"serialize", "deserialize"},
    "DynamicShapesKernelSpecializationStrategy": {"EAGER"},
    "ComputeCapability": set(),
}
"""The members that only TensorRT-RTX has. The runtime checks ``hasattr`` or the flavour before it
uses them."""
ONLY_SOME = {"BuilderFlag": {"REQUIRE_USER_ALLOCATION"}}
"""Members for which the builder checks ``hasattr``."""
USERS = (
    "runtime/engines/trt_plans.py",
    "runtime/engines/trt_engine.py",
    "runtime/embed.py",
    "export/plans.py",
    "export/build.py",
)


def test_every_version_has_its_file() -> None:
    assert sorted(FLAVOUR) == ALL


def test_the_file_of_the_installed_library_is_current() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    name = VERSIONS["tensorrt-rtx"][-1]
    assert trt.__version__ == load(name).version, (
        "write the file of the new version with support/trt_signatures.py"
    )
    assert (DATA / f"{name}.json").read_text() == to_json(signatures(trt))


def offered(cls: type) -> Iterator[tuple[str, Any]]:
    """Yields the public members of a class of the fake."""
    for name, member in vars(cls).items():
        if not name.startswith("_"):
            yield name, member


@pytest.mark.parametrize("cls", fake.CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("version", ALL)
def test_what_the_fake_offers_exists(cls: type[fake.Fake], version: str) -> None:
    """The fake's methods have the parameters of an overload of the real methods, with the same
    names."""
    api = load(version)
    rtx_only = RTX_ONLY.get(cls.__name__, set())
    for name, member in offered(cls):
        assert api.has(cls.__name__, name) == (
            name not in rtx_only or FLAVOUR[version] == "tensorrt-rtx"
        ), name
        if not api.has(cls.__name__, name):
            continue
        assert isinstance(member, property) == api.is_property(cls.__name__, name), name
        # This method has one Python signature for two overloads.
        if not isinstance(member, property) and name != "create_execution_context":
            assert arguments(member) in real_arguments(api, cls.__name__, name), name


def arguments(method: Any) -> list[str]:
    code = method.__code__
    return list(code.co_varnames[1 : code.co_argcount])


def real_arguments(api: Api, cls: str, name: str) -> list[list[str]]:
    """Returns the names of the arguments of each overload."""
    return [[one.name for one in parameters(text)] for text in api.classes[cls][name]]


@pytest.mark.parametrize("version", ALL)
def test_the_fake_refuses_what_the_real_library_refuses(version: str) -> None:
    trt = fake.module(FLAVOUR[version], version)
    runtime = trt.Runtime(trt.ILogger())
    context = trt.IExecutionContext(None, None)
    refused: tuple[Callable[[], Any], ...] = (
        lambda: context.set_tensor_address("x"),
        lambda: context.set_tensor_address("x", 1, 2),
        lambda: context.set_tensor_address("x", address=1),
        lambda: context.set_tensor_address("x", "1"),
        lambda: context.set_input_shape(1, (1, 2)),
        lambda: context.set_input_shape("x", 7),
        lambda: context.execute_async_v3(),
        lambda: context.execute_async_v3(None),
        lambda: runtime.deserialize_cuda_engine("a path"),
        lambda: trt.Runtime("a logger"),
    )
    for call in refused:
        with pytest.raises(TypeError):
            call()
    with pytest.raises(AttributeError, match="has no attribute 'execute_v9'"):
        context.execute_v9(0)
    with pytest.raises(AttributeError, match="no profile_index that can be set"):
        context.profile_index = 1
    context.set_device_memory(memory=256, size=1)
    assert (context._scratch, context._scratch_size) == (256, 1)


def names_used() -> set[tuple[str, ...]]:
    """Returns the names after ``trt`` that the code uses, as in ``trt.BuilderFlag.REFIT``."""
    found = set()
    for user in USERS:
        for node in ast.walk(ast.parse((Path(__file__).parents[2] / user).read_text())):
            names: list[str] = []
            while isinstance(node, ast.Attribute):
                names.insert(0, node.attr)
                node = node.value
                if names and (ast.unparse(node) in ("trt", "self.trt")):
                    found.add(tuple(names))
    return found


def test_what_the_code_takes_from_the_module_exists() -> None:
    used = names_used()
    assert {
        ("ILogger",),
        ("BuilderFlag", "REQUIRE_USER_ALLOCATION"),
        ("LayerType", "KV_CACHE_UPDATE"),
    } <= used
    for version in ALL:
        api = load(version)
        missing = {names for names in used if not exists(api, names)}
        allowed = {names for names in missing if optional(names)}
        assert missing == allowed and (not missing or FLAVOUR[version] == "tensorrt"), (
            version,
            missing - allowed,
        )


def exists(api: Api, names: tuple[str, ...]) -> bool:
    first, *rest = names
    members = api.enums.get(first) or api.enums.get(f"{first}.Severity") if rest else None
    if members is not None and rest[0] in [*members, "__members__"]:
        return True
    return (first in api.classes and (not rest or api.has(first, rest[0]))) or (
        not rest and first in api.enums
    )


def optional(names: tuple[str, ...]) -> bool:
    first, *rest = names
    return (first in RTX_ONLY and set(rest) <= RTX_ONLY[first]) or (
        bool(rest) and rest[0] in ONLY_SOME.get(first, ())
    )


BUILDER_CALLS: dict[str, dict[str, tuple[str, ...] | None]] = {
    "Builder": {
        "build_serialized_network_to_stream": ("network", "config", "writer"),
        "create_network": ("flags",),
        "create_builder_config": (),
        "create_optimization_profile": (),
    },
    "IBuilderConfig": {
        "set_flag": ("flag",),
        "get_timing_cache": (),
        "set_timing_cache": ("cache", "ignore_mismatch"),
        "create_timing_cache": ("serialized_timing_cache",),
        "profiling_verbosity": None,
        "progress_monitor": None,
    },
    "IOptimizationProfile": {"set_shape": ("input", "min", "opt", "max")},
    "OnnxParser": {"parse_from_file": ("model",)},
    "ITimingCache": {"serialize": ()},
    "INetworkDefinition": {"get_layer": ("index",), "num_layers": None},
    "ILayer": {"type": None},
    "IStreamWriter": {"write": ("data", "size")},
    "IProgressMonitor": {
        "phase_start": ("phase_name", "parent_phase", "num_steps"),
        "phase_finish": ("phase_name",),
        "step_complete": ("phase_name", "step"),
    },
}
"""The members that the builder uses, with their parameters. The value is None if the member is a
property."""


@pytest.mark.parametrize("version", ALL)
def test_what_the_builder_uses_exists(version: str) -> None:
    api = load(version)
    for cls, members in BUILDER_CALLS.items():
        for name, wanted in members.items():
            assert api.has(cls, name), (cls, name)
            assert api.is_property(cls, name) == (wanted is None), (cls, name)
            if wanted is not None:
                assert list(wanted) in real_arguments(api, cls, name), (cls, name)
