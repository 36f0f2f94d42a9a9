"""How large the core is: what ``runtime.llm`` and the batch import, directly or through others. ``make lint`` runs this file.

A reader of a request's way from prompt to tokens meets these files. The budgets only fall: a change that adds lines takes
as many away elsewhere.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.imports import PACKAGE, closure, graph, modules

STARTS = ("runtime.llm", "runtime.batch.service")
DEVICES = (
    *(f"runtime.engines.{name}" for name in ("ort_gpu", "torch_engine", "trt_engine", "trt_plans")),
    *(f"runtime.decoding.{name}" for name in ("device_sampler", "device_rejection")),
)
"""Where the code for devices begins."""
BUDGETS = {"without devices": (11213, 60), "with devices": (17178, 88)}
"""Most lines and files."""


def sizes(package: Path = PACKAGE) -> dict[str, tuple[int, int]]:
    """Lines and files of the core."""
    edges, files = graph(package), dict(modules(package))
    without = {"without devices": DEVICES, "with devices": ()}
    parts = {name: set().union(*(closure(edges, start, left) for start in STARTS)) for name, left in without.items()}
    return {
        name: (sum(len(files[module].read_text("utf-8").splitlines()) for module in found), len(found))
        for name, found in parts.items()
    }


def main() -> int:
    found = sizes(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE)
    for name, (lines, files) in found.items():
        most_lines, most_files = BUDGETS[name]
        print(f"The core {name}: {lines} lines in {files} files; the budget is {most_lines} in {most_files}.")
    return int(any(size > most for name in found for size, most in zip(found[name], BUDGETS[name], strict=True)))


if __name__ == "__main__":
    sys.exit(main())
