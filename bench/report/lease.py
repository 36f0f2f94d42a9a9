"""The page of a GPU that was at hand for minutes: what is equal, and what each constant of docs/predict.md really is.

The lines come from ``tests/gpu_lease.py``, one for each step.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.json_input import json_lines, read_text
from eesd.common.markdown import table
from eesd.common.outputs import check_own
from eesd.export.predict import GPUS, KERNELS_PER_BLOCK, OTHER_KERNELS, Hardware

TITLE = "# A lease:"
Found = Mapping[str, Any]
"""What the steps found, by their names."""


def read_lease(path: Path) -> list[dict[str, Any]]:
    """The last line of each step.

    Raises:
        EESDError: The file has something else.
    """
    remedy = "give the lease.jsonl that tests/gpu_lease.py wrote"
    lines = [line for _, line in json_lines(read_text(path, remedy), str(path), remedy)]
    if not lines or not all(isinstance(line, dict) and {"step", "status", "seconds"} <= line.keys() for line in lines):
        raise EESDError(f"{path} does not have the lines of steps; {remedy}.")
    return list({line["step"]: line for line in lines}.values())


def write_lease(lines: Sequence[dict[str, Any]], output: Path) -> None:
    """Write the page as Markdown. Raises :class:`EESDError` if ``output`` is something else."""
    found = {line["step"]: line["found"] for line in lines if "found" in line}
    ended = sum(line["status"] == "ok" for line in lines)
    parts = [
        f"{TITLE} {_machine(found)}",
        f"{ended} of {len(lines)} steps ended well.",
        "\n".join(
            table(["step", "how it ended", "seconds"], [[one["step"], one["status"], str(one["seconds"])] for one in lines])
        ),
        *_equal(found),
        *_passes(found),
        *_rows(found),
        *_quantized(found),
        *_constants(found),
        *_errors(lines),
    ]
    with written_whole(output) as temporary:
        temporary.write_text("\n\n".join(parts) + "\n", "utf-8")
        check_own(output, TITLE)


def _machine(found: Found) -> str:
    machine = found.get("machine", {})
    return f"{machine.get('gpu') or 'a CPU'}, torch {machine.get('torch', '?')}"


def _equal(found: Found) -> list[str]:
    lines = [f"* {name}: {value}" for name, value in found.get("one pass", {}).items()]
    for dtype in ("float16", "bfloat16"):
        for way, value in found.get(f"tokens in {dtype}", {}).items():
            lines.append(f"* {dtype}, {way}: {_said(value)}")
    for name, types in (found.get("families", {}) | found.get("EAGLE-3", {})).items():
        lines += [f"* {name}, {dtype}: {_said(value)}" for dtype, value in types.items()]
    for flavour, plan in found.get("plans", {}).items():
        parts = plan.items() if isinstance(plan, dict) else [("", plan)]
        lines += [f"* plans, {flavour}, {name}: {_said(value)}" for name, value in parts if name != "built"]
    if products := found.get("quantized products"):
        said = {name: value or "none" for name, value in products.items() if name != "milliseconds of a block"}
        lines += [f"* quantized products, {name}: {value}" for name, value in said.items()]
    if tests := found.get("tests"):
        lines.append(f"* tests for GPUs: {_said(tests)}")
    return ["## What is equal", "\n".join(lines)] if lines else []


def _said(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{name} {part:.3g}" if isinstance(part, float) else f"{name} {part}" for name, part in value.items())


def _passes(found: Found) -> list[str]:
    parts = []
    for name, step in found.items():
        if not name.startswith("passes of"):
            continue
        ways = [way for way in ("graphs", "eager", "one node count") if way in step]
        calls = step[ways[0]]
        rows = [[call, *(f"{step[way].get(call, float('nan')):.3f}" for way in ways)] for call in calls]
        parts += [f"## Milliseconds, {step['layers']} layers, {step['slots']} slots", "\n".join(table(["call", *ways], rows))]
    return parts


def _rows(found: Found) -> list[str]:
    rows = [[name, f"{value:.3f}"] for name, value in found.get("rows", {}).items()]
    return ["## Rows that decode together", "\n".join(table(["call", "ms"], rows))] if rows else []


def _quantized(found: Found) -> list[str]:
    timed = found.get("quantized products", {}).get("milliseconds of a block")
    if not timed:
        return []
    rows = [[rows, *(f"{kind[rows]:.3f}" for kind in timed.values())] for rows in next(iter(timed.values()))]
    return ["## Milliseconds of the products of a block of 8B", "\n".join(table(["rows", *timed], rows))]


def _constants(found: Found) -> list[str]:
    """Each constant of the predictions: what is assumed, and what was seen."""
    machine, counted = found.get("machine", {}), found.get("constants", {})
    assumed = next((one for one in GPUS.values() if one.name.split()[0] in str(machine.get("gpu"))), None)
    seen: list[tuple[str, str, str]] = [
        ("bandwidth of a copy, TB/s", _of(assumed, "bandwidth", 1e12), _shown(machine.get("bandwidth"), 1e12)),
        ("products in bfloat16, TFLOP/s", _of(assumed, "operations", 1e12), _shown(machine.get("products"), 1e12)),
        ("a launch in a CUDA graph, us", _of(assumed, "launch", 1e-6), _shown(machine.get("launch"), 1e-6)),
        ("kernels of a block", str(KERNELS_PER_BLOCK), _shown(counted.get("kernels of a block"))),
        ("other kernels", str(OTHER_KERNELS), _shown(counted.get("other kernels"))),
        (
            "a call of a tiny model, us",
            _of(assumed, "host", 1e-6),
            _shown(counted.get("milliseconds of a call of a tiny model"), 1e-3),
        ),
    ]
    seen += [_attained(name, step, assumed) for name, step in found.items() if name.startswith("passes of") and "bytes" in step]
    return ["## Constants", "\n".join(table(["constant", "assumed", "seen"], [list(row) for row in seen]))]


def _attained(name: str, step: Mapping[str, Any], assumed: Hardware | None) -> tuple[str, str, str]:
    """The share of the published bandwidth that a pass over one node attains."""
    per_second = step["bytes"]["weights and cache"] / (step["graphs"]["verify 1"] * 1e-3)
    share = f"{per_second / assumed.bandwidth:.2f}" if assumed else f"{per_second / 1e9:.1f} GB/s"
    return f"bandwidth that a pass attains ({name})", _of(assumed, "attained", 1), share


def _of(hardware: Hardware | None, name: str, unit: float) -> str:
    return "" if hardware is None else f"{getattr(hardware, name) / unit:.4g}"


def _shown(value: float | None, unit: float = 1) -> str:
    return "" if value is None else f"{value / unit:.4g}"


def _errors(lines: Sequence[dict[str, Any]]) -> list[str]:
    failed = [line for line in lines if line["status"] != "ok"]
    parts = [f"### {line['step']}: {line['status']}\n\n```\n{line.get('error', '').strip()}\n```" for line in failed]
    return ["## What failed", *parts] if failed else []
