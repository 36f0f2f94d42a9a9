"""Lists the files that a default round runs through on the CPU."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import click

from eesd.runtime.llm import load

ROOT = Path(__file__).resolve().parent.parent


def files_of(action: Callable[[], object]) -> list[Path]:
    """Return the files of this project that an action executes, in order. A file that runs twice in
    a row is listed once."""
    files = list[Path]()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        file = Path(frame.f_code.co_filename).resolve()
        if ROOT not in file.parents or file.name.startswith("<") or file == Path(__file__):
            return None
        if event in ("call", "line") and file not in files[-1:]:
            files.append(file)
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return files


@click.command()
@click.argument("plans", type=click.Path(path_type=Path))
def main(plans: Path) -> None:
    """Print how many files a default round visits, their lines, and how often it changes files.

    PLANS is an engine directory, such as an export of examples/pycode/model. For each number of
    draft steps and nodes, the round that changes files least often is printed.
    """
    llm = load(plans, "ort", threads=1)
    prompt = (ROOT / "examples/pycode/prompt.txt").read_text()
    found = dict[tuple[int, int], list[Path]]()
    with llm.session(prompt, max_new_tokens=200, ignore_eos=True) as session:
        results = []
        while session.finish_reason is None:
            files = files_of(lambda: results.append(session.step()))
            outcome = results[-1].outcome
            key = outcome.steps, outcome.nodes
            if key not in found or len(files) < len(found[key]):
                found[key] = files
    print("steps  nodes  files  lines  changes of file")
    for (steps, nodes), files in sorted(found.items()):
        lines = sum(len(file.read_text().splitlines()) for file in {*files})
        print(f"{steps:5} {nodes:6} {len({*files}):6} {lines:6} {len(files) - 1:8}")


if __name__ == "__main__":
    main()
