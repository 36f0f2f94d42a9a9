"""Finds the imports between the modules of the package by reading their sources."""

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "src" / "eesd"
ROOMS = ("common", "controllers", "model", "runtime", "export", "serve", "distill", "bench")


def modules(package: Path = PACKAGE) -> Iterator[tuple[str, Path]]:
    """Yields the dotted name inside eesd and the file of every module."""
    for room in ROOMS:
        for path in sorted((package / room).rglob("*.py")):
            name = ".".join(path.relative_to(package).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Returns the modules that a file imports. The flag says whether the file imports the module
    when it is loaded, and not in a function. Imports that are only needed for types are left
    out."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    tree = ast.parse(path.read_text("utf-8"))
    for_types = _inside([node for node in ast.walk(tree) if _is_for_types(node)])
    lazy = _inside([node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)])
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "eesd"
                else [node.module]
            )
            yield from ((name, id(node) not in lazy) for name in names)


def graph(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Returns, for each module, the modules of the package that it imports. Imports inside
    functions are included."""
    files = dict(modules(package))
    found = {
        name: {imported.removeprefix("eesd.") for imported, _ in imports(path)}
        for name, path in files.items()
    }
    return {name: (imported & files.keys()) - {name} for name, imported in found.items()}


def closure(edges: dict[str, set[str]], start: str, without: Sequence[str] = ()) -> set[str]:
    """Returns a module and everything that it imports, directly or indirectly. Imports through the
    modules in ``without`` are left out."""
    found = set[str]()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in found and name not in without:
            found.add(name)
            waiting += edges[name]
    return found


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _inside(outer: Sequence[ast.AST]) -> set[int]:
    return {id(node) for one in outer for node in ast.walk(one)}
