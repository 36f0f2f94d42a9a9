"""Counts the size of five parts of the project. ``make lint`` runs this file, and fails if a part
exceeds its budget.

The unit is the statement, so comments, docstrings and layout do not count. The core is everything
that ``runtime.llm`` and the batch import, directly or indirectly. These are the files on a
request's way from the prompt to the tokens. The budgets only fall. A change that adds statements
therefore removes the same number elsewhere.
"""

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.imports import PACKAGE, closure, graph, modules

STARTS = ("runtime.llm", "runtime.batch.service")
DEVICES = (
    *(
        f"runtime.engines.{name}"
        for name in ("ort_engine", "torch_engine", "trt_engine", "trt_plans")
    ),
    *(f"runtime.decoding.{name}" for name in ("device_sampler", "device_noise")),
)
"""Modules at which the code for devices and for ONNX Runtime's operators begins."""
CPU = tuple(
    f"runtime.engines.{name}" for name in ("cpu_build", "cpu_cache", "cpu_engine", "operators")
)
"""The CPU backend's Python modules in the runtime. Its operators are in C++, and ``export/cpu``
builds directories for them."""
TESTS = Path(__file__).parent.parent
BUDGETS = {
    "core": (4885, 43),
    "CPU backend": (3148, 33),
    "core with all devices": (9664, 79),
    "Python outside tests": (26713, 288),
    "tests": (24793, 179),
}
"""The largest allowed numbers of statements and files."""
NOT_CODE = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | (?<![0-9a-fA-F])'(?:\\.|[^'\\])+' | "(?:\\.|[^"\\])*" """,
    re.S | re.X,
)
"""Matches C++ comments, character literals and string literals. A quote after a digit only
separates digits."""


def sizes(package: Path = PACKAGE) -> dict[str, tuple[int, int]]:
    """Returns the numbers of statements and files of each part."""
    edges = graph(package)
    files = dict(modules(package))

    def reached(without: tuple[str, ...]) -> list[Path]:
        found = set[str]().union(*(closure(edges, start, without) for start in STARTS))
        return [files[name] for name in found]

    operators = [
        path for path in (package / "runtime/operators").iterdir() if path.suffix in (".cpp", ".h")
    ]
    return {
        "core": _size(reached((*DEVICES, *CPU))),
        "CPU backend": _size(
            [*(files[name] for name in CPU), *operators, *(package / "export/cpu").glob("*.py")]
        ),
        "core with all devices": _size(reached(())),
        "Python outside tests": _size(files.values()),
        "tests": _size(TESTS.rglob("*.py")),
    }


def _size(paths: Iterable[Path]) -> tuple[int, int]:
    counts = [statements(path) for path in paths]
    return sum(counts), len(counts)


def statements(path: Path) -> int:
    """Returns the number of statements of a file. In C++, the semicolons outside parentheses are
    counted. In Python, all statements except docstrings are counted."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
        return sum(not _is_docstring(node) for node in found)
    depth = count = 0
    for sign in NOT_CODE.sub("", text):
        depth += (sign == "(") - (sign == ")")
        count += sign == ";" and depth == 0
    return count


def _is_docstring(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def main() -> int:
    found = sizes(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE)
    print(f"{'':22} {'statements':>10} {'most':>6} {'files':>6} {'most':>5}")
    for name, (count, files) in found.items():
        most_count, most_files = BUDGETS[name]
        print(f"{name:22} {count:10} {most_count:6} {files:6} {most_files:5}")
    return int(
        any(
            size > most
            for name in found
            for size, most in zip(found[name], BUDGETS[name], strict=True)
        )
    )


if __name__ == "__main__":
    sys.exit(main())
