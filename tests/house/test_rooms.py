"""Tests that the rooms of the package import in only one direction, and that a type checker can
find every import in a fresh clone."""

import re
from pathlib import Path

import pytest
from support.core_size import BUDGETS, sizes
from support.imports import PACKAGE, ROOMS, graph, imports, modules

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parent.parent.parent
MAY_IMPORT = {
    "common": set(),
    "controllers": {"common"},
    "model": {"common"},
    "runtime": {"common", "controllers", "model"},
    "export": {"common", "controllers", "model", "runtime"},
    "serve": {"common", "controllers", "model", "runtime"},
    "distill": {"common", "controllers", "model", "runtime", "export"},
    "bench": {"common", "controllers", "model", "runtime", "export", "serve"},
}
"""The rooms from the lowest to the highest. Each has the set of rooms that it may import."""
LAZILY = {"runtime.engine_options": "eesd.export.prepare"}
"""A command makes these imports from a higher room inside a function, because ``--model`` exports
the model that is then run."""
MAY_IMPORT_INSIDE = {
    "runtime.engines": set(),
    "runtime.decoding": {"runtime.engines"},
    "serve.anthropic": {"serve.grammar", "serve.http", "serve.openai"},
    "serve.grammar": set(),
    "serve.http": set(),
    "serve.openai": {"serve.grammar", "serve.http"},
    "serve.page": {"serve.http", "serve.openai"},
    "serve.triton": set(),
    "bench.measure": set(),
    "bench.replay": {"bench.measure"},
    "bench.report": {"bench.measure", "bench.replay"},
}
"""Parts of a room that may import only these other parts of the room."""
TORCH_FREE = {"common", "controllers", "runtime"}
"""Rooms that must load without torch, except for the files below."""
TORCH_FILES = {
    "device.py",
    "cuda_graph.py",
    "device_engine.py",
    "device_noise.py",
    "device_results.py",
    "draft_loop.py",
    "forward_step.py",
    "device_sampler.py",
    "device_cache.py",
    "torch_engine.py",
    "torch_fused.py",
    "torch_kernel.py",
    "torch_quantized.py",
    "torch_weights.py",
    "team.py",
    "trt_engine.py",
    "embed.py",
}


ONNX_FILES = {"torch_weights.py"}
"""The files of these rooms that import onnx when they are loaded. They are loaded only to make or
read a graph."""
MODEL_FILES = {
    "device.py",
    "forward_step.py",
    "team.py",
    "torch_engine.py",
    "torch_fused.py",
    "torch_quantized.py",
    "torch_weights.py",
}
"""These files of the runtime use the model's torch modules. They are the torch engine and the files
that it shares with other engines on devices."""


def test_every_room_is_listed() -> None:
    assert {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"
    } == MAY_IMPORT.keys()
    assert tuple(MAY_IMPORT) == ROOMS


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_one_way(room: str) -> None:
    for name, path in modules():
        if name.partition(".")[0] != room:
            continue
        for imported, at_load in imports(path):
            parts = imported.split(".")
            if LAZILY.get(name) == imported and not at_load:
                continue
            if parts[0] == "eesd" and len(parts) > 1 and parts[1] not in (room, "__version__"):
                assert parts[1] in MAY_IMPORT[room], (
                    f"{path} imports {imported}: {room} must not know {parts[1]}"
                )


def test_the_order_of_the_rooms_has_no_cycle() -> None:
    rooms = list(MAY_IMPORT)
    assert all(
        rooms.index(lower) < rooms.index(room)
        for room, others in MAY_IMPORT.items()
        for lower in others
    )


def test_modules_inside_a_room_have_no_cycle() -> None:
    """No module imports itself through other modules, not even inside functions."""
    edges = graph()
    done = set[str]()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a cycle: {' -> '.join((*path, name))}"
        if name not in done:
            for imported in edges[name]:
                visit(imported, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


@pytest.mark.parametrize("part", MAY_IMPORT_INSIDE)
def test_parts_of_a_room_import_one_way(part: str) -> None:
    room = part.partition(".")[0]
    for name, path in modules():
        if not name.startswith(f"{part}."):
            continue
        for imported, _ in imports(path):
            inside = f"{imported.removeprefix('eesd.')}."
            if inside.startswith(f"{room}.") and not inside.startswith(f"{part}."):
                assert any(inside.startswith(f"{other}.") for other in MAY_IMPORT_INSIDE[part]), (
                    f"{path} imports {imported}"
                )


def test_the_package_does_not_import_the_lab() -> None:
    assert not any(
        f"{imported}.".startswith("lab.") for _, path in modules() for imported, _ in imports(path)
    )


@pytest.mark.parametrize(
    ("name", "rooms", "allowed"),
    [
        ("torch", TORCH_FREE, TORCH_FILES),
        ("onnx", TORCH_FREE, ONNX_FILES | TORCH_FILES),
        ("eesd.model", {"runtime"}, MODEL_FILES),
    ],
)
def test_packages_are_imported_where_they_belong(
    name: str, rooms: set[str], allowed: set[str]
) -> None:
    """External packages may be imported inside functions everywhere."""
    for module, path in modules():
        if module.partition(".")[0] in rooms and path.name not in allowed:
            assert not any(
                f"{imported}.".startswith(f"{name}.") and (at_load or name == "eesd.model")
                for imported, at_load in imports(path)
            ), path


def test_every_import_of_the_package_is_a_file() -> None:
    """An editor without an installation sees only plain files below src."""
    known = {name for name, _ in modules()} | set(MAY_IMPORT) | {"__version__"}
    for _, path in modules():
        for imported, _ in imports(path):
            if imported.startswith("eesd."):
                assert imported.removeprefix("eesd.") in known, f"{path} imports {imported}"


def test_no_test_module_imports_another() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert not any(re.match(r"(tests\.)?test_", imported) for imported, _ in imports(path)), (
            path
        )


@pytest.mark.parametrize("part", BUDGETS)
def test_the_core_keeps_to_its_budget(part: str) -> None:
    assert all(size <= most for size, most in zip(sizes()[part], BUDGETS[part], strict=True)), (
        sizes()
    )
