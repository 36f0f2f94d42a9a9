"""``eesd-distill --predict``: what a run would take on a GPU or on this CPU. Neither GPU nor weights need be there."""

import re
from math import prod
from typing import Any

import torch

from eesd.common.errors import EESDError
from eesd.common.markdown import table
from eesd.common.weights import BITS, exit_head_shapes, model_shapes
from eesd.distill.card import described
from eesd.distill.device_writer import can_write
from eesd.distill.forecast import Forecast, Machine, Work, duration, forecast, millions, own_tokens
from eesd.distill.memory import USABLE, advice, disk, memory
from eesd.distill.run import checked, codec_of, with_mixed
from eesd.distill.structure import head_config
from eesd.export.predict import CPU, GPUS, Hardware
from eesd.model.checkpoint import model_config
from eesd.model.exit_head import check_exit
from eesd.model.exit_head_file import read_exit_config
from eesd.model.hub import find_head, find_model


def predict(options: dict[str, Any], where: str) -> str:
    """What the run with these options would take.

    Args:
        options: The options of ``eesd-distill``, by parameter name.
        where: ``cpu``, which is this one; or a GPU by its name, with a number before it if there are several: ``4xh100``.

    Returns:
        Markdown.

    Raises:
        EESDError: An option is wrong, a file is missing, or there is no such GPU.
    """
    count, hardware = _hardware(where)
    path = find_model(options["model"], weights=False)
    config = model_config(path)
    geometry = config.geometry
    given = None if options["init_head"] is None else read_exit_config(find_head(options["init_head"]), None)
    training, data = checked(options, config, given)
    check_exit(geometry, head_config(training))
    if hardware is not None and training.precision != "bf16":
        raise EESDError("GPUs are predicted for products in 16 bits; leave out --precision, or measure a step.")
    written = 0 if data.files else own_tokens(data.own_rows, training.length)
    tokens = written
    if data.files:
        tokens = int(with_mixed(data, data.files, codec_of(path), geometry.vocab_size, training.length).lengths.sum())
    dtype = options["dtype"] or ("float32" if hardware is None else "bfloat16")
    offline = options["offline"] is not None
    work = Work(geometry, training, written, tokens, data.own_batch, offline, count, BITS[dtype] // 8)
    head = sum(map(prod, exit_head_shapes(geometry, head_config(training)).values()))
    lines = [
        f"{options['model']}: {geometry.architecture}, {geometry.num_layers} layers of {geometry.hidden_size}, "
        f"{sum(map(prod, model_shapes(geometry).values())) / 1e6:,.0f} M weights; "
        f"its head: {described(head_config(training), head)}"
    ]
    if hardware is None:
        found = forecast(work, Machine.measured(torch.device(CPU), training.precision))
        return "\n".join([*lines, str(found), _disk(work)])
    found = forecast(work, Machine.of(hardware))
    return "\n".join([*lines, *_on_gpus(work, found, count, hardware), _disk(work), found.knowledge])


def _hardware(where: str) -> tuple[int, Hardware | None]:
    """Number and kind of GPUs; no kind: this CPU."""
    parts = re.fullmatch(r"(?:([1-9][0-9]{0,3})x)?([a-z0-9]+)", where)
    if parts is not None and where == CPU:
        return 1, None
    if parts is None or parts[2] not in GPUS:
        raise EESDError(f"--predict takes {', '.join((CPU, *GPUS))}, or several GPUs such as 4xh100; {where!r} was given.")
    return int(parts[1] or 1), GPUS[parts[2]]


def _on_gpus(work: Work, found: Forecast, count: int, gpu: Hardware) -> list[str]:
    """Time and memory of each phase, and what fits."""
    taken, usable = memory(work), USABLE * gpu.memory
    phases = (
        ("the model writes", found.written, found.seconds[0], taken.writing),
        ("it computes targets", found.read, found.seconds[1], taken.reading if work.offline else 0),
        ("the head is trained", found.trained, found.seconds[2], taken.training),
    )
    rows = [
        (phase, f"{millions(tokens)} tokens", duration(seconds), f"{held / 1e9:.1f} GB" if held else "with the training")
        for phase, tokens, seconds, held in phases
        if tokens
    ]
    number = f"{count} x " if count > 1 else ""
    slow = (
        []
        if can_write(work.geometry) or not work.written
        else [f"{work.geometry.architecture} has no writer for GPUs: torch writes, many times slower than is computed here."]
    )
    return [
        f"computed, not measured, for {number}{gpu.name}, {gpu.memory / 1e9:.0f} GB, of which tensors can have "
        f"{usable / 1e9:.1f} (docs/distill.md says from what):",
        "",
        *table(("", "", "time", "memory of a GPU"), [*rows, ("together", "", duration(sum(found.seconds)), "")]),
        *slow,
        *advice(work, usable),
    ]


def _disk(work: Work) -> str:
    taken = disk(work)
    parts = {"own text": taken.text, "targets": taken.targets, "checkpoints": taken.checkpoints}
    return "On the disk: " + ", ".join(f"{part / 1e9:.2f} GB of {what}" for what, part in parts.items() if part) + "."
