"""Makes an LLM on the GPUs of ``fake_cuda.py``, and computes its expected tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest

import eesd
from eesd.export.cpu.build import build_for_cpu
from eesd.export.engine_dir import export, stored_head
from eesd.export.onnx_graph import ExportOptions
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines import trt_engine, trt_plans  # noqa: F401  # before torch.cuda is replaced, which its annotations name
from eesd.runtime.llm import LLM, Speculation
from support import fake_tensorrt, tiny_models
from support.eagle_heads import deep_head
from support.fake_cuda import Machine, install

PROMPTS = (
    [5, 9, 3],
    [60, 2, 44, 44, 17, 8, 90, 31, 5, 5, 71, 12],
    [token % 97 for token in range(3, 50)],
)
SAMPLINGS = (Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=4))
TOKENS = 12


@dataclass(frozen=True)
class Setting:
    """The options of an LLM whose verify graph has ``stages`` stages on ``devices`` GPUs. If
    ``few_slots`` is true, attention may read only the first slots. If ``deep`` is true, the exit
    head reads deep states. If ``whole`` is true, the draft is the whole model in 4 bits.
    ``flavour`` is the flavour of the plans, or ``torch``. ``speculation`` and ``exact`` have the
    same meaning as in ``eesd.load``."""

    stages: int
    devices: int
    speculation: Speculation
    flavour: str = "tensorrt"
    cuda_graphs: bool = True
    few_slots: bool = False
    deep: bool = False
    whole: bool = False
    exact: bool | None = None


CHAIN = Speculation("fixed:k=4", guard=False)
TREE = Speculation("calibration-ts", 2, guard=False)
SETTINGS = {
    "chain": Setting(1, 1, CHAIN),
    "tree": Setting(1, 1, TREE, "tensorrt-rtx"),
    "chain in 3 stages on 3 GPUs": Setting(3, 3, CHAIN),
    "tree in 3 stages on 2 GPUs": Setting(3, 2, TREE),
    "tree in 3 stages on 3 GPUs without CUDA graphs": Setting(3, 3, TREE, cuda_graphs=False),
    "chain over few slots": Setting(1, 1, CHAIN, few_slots=True),
    "tree in 3 stages on 3 GPUs over few slots": Setting(3, 3, TREE, few_slots=True),
    "chain of a head with deep layers": Setting(1, 1, CHAIN, deep=True),
    "tree of a head with deep layers": Setting(1, 1, TREE, "tensorrt-rtx", deep=True),
    "chain of the whole model": Setting(1, 1, CHAIN, "tensorrt-rtx", whole=True),
    "chain by torch": Setting(1, 1, CHAIN, "torch"),
    "chain of the whole model by torch": Setting(
        1, 1, Speculation(guard=False), "torch", whole=True
    ),
    "tree of the whole model by torch": Setting(1, 1, TREE, "torch", whole=True),
    "tree in 3 stages on 2 GPUs by torch": Setting(3, 2, TREE, "torch"),
    "tree of a head with deep layers by torch, without CUDA graphs": Setting(
        1, 1, TREE, "torch", cuda_graphs=False, deep=True
    ),
}

QUICK = (
    "chain",
    "chain in 3 stages on 3 GPUs",
    "tree in 3 stages on 3 GPUs without CUDA graphs",
    "tree in 3 stages on 3 GPUs over few slots",
    "tree of a head with deep layers",
    "chain of the whole model",
    "tree of the whole model by torch",
    "tree in 3 stages on 2 GPUs by torch",
)
"""Settings that ``make test`` uses. Each field occurs at least once, with plans and with torch.
Other settings combine the same fields."""

Shared = Callable[[str, Callable[[Path], object]], Path]
"""The fixture ``shared``."""
Planned = Callable[[Setting], Path]
"""The fixture ``planned``."""


def directory(shared: Shared, setting: Setting) -> Path:
    """Returns the engine directory of a setting."""
    name = (
        f"late-{setting.stages}-{setting.flavour}-{setting.few_slots}"
        f"-{setting.deep}-{setting.whole}"
    )
    return shared(name, partial(build, setting=setting)) / "plans"


def allow_few_slots(patch: pytest.MonkeyPatch) -> None:
    """Allow the attention of the verify and draft graphs to read the first 16, 48 or 112 slots. A
    text has 96 slots."""
    patch.setattr(trt_plans, "FEWEST_SLOTS", 16)
    patch.setattr(trt_plans, "LONG_CACHE", 0)


def build(path: Path, setting: Setting) -> None:
    """Write an engine directory ``plans`` with plans of a four-layer model."""
    model = tiny_models.build(path / "model", 97, layers=4, damping=0.3, seed=0)
    if setting.deep:
        deep_head(Checkpoint(model), path / "head")
        head = stored_head(Checkpoint(model), path / "head")
        options = ExportOptions("float32", 96, 12, 4)
        build_for_cpu(path / "plans", export(Checkpoint(model), head, options, path / "plans"))
    else:
        tiny_models.export_tiny(
            model, path / "plans", slots=96, stages=setting.stages, whole=setting.whole
        )
    if setting.flavour == "torch":
        return
    with pytest.MonkeyPatch.context() as patch:
        if setting.few_slots:
            allow_few_slots(patch)
        fake_tensorrt.write_plans(path / "plans", setting.flavour)


@contextmanager
def late_llm(directory: Path, setting: Setting, seed: int) -> Iterator[tuple[Machine, LLM]]:
    """Yields a machine and an LLM on this machine. The ``seed`` determines the order of the
    machine's events."""
    with pytest.MonkeyPatch.context() as patch, install(Machine(setting.devices, seed)) as machine:
        fake_tensorrt.install(patch)
        if setting.few_slots:
            allow_few_slots(patch)
        backend = "torch" if setting.flavour == "torch" else "tensorrt"
        llm = eesd.load(directory, backend, speculation=setting.speculation, exact=setting.exact)
        if not setting.cuda_graphs:
            llm.engines.verify.cuda_graphs = llm.engines.draft.cuda_graphs = False  # type: ignore[attr-defined, union-attr]
        yield machine, llm


@cache
def expected(directory: Path) -> dict[tuple[int, int], list[int]]:
    """Returns the tokens of plain decoding with ONNX Runtime, by the number of the prompt and the
    number of the sampling."""
    plain = eesd.load(directory, "ort", speculation=None, threads=1)
    return {
        (number, rule): plain.generate(
            prompt, sampling, max_new_tokens=TOKENS, ignore_eos=True
        ).tokens
        for number, prompt in enumerate(PROMPTS)
        for rule, sampling in enumerate(SAMPLINGS)
    }


def wrong(directory: Path, machine: Machine, llm: LLM, seeds: range) -> list[int]:
    """Returns the seeds with which the LLM's tokens differ from the tokens of ONNX Runtime."""
    found = []
    for seed in seeds:
        machine.reseed(seed)
        number = seed % len(PROMPTS)
        rule = seed % len(SAMPLINGS)
        made = llm.generate(
            PROMPTS[number], SAMPLINGS[rule], max_new_tokens=TOKENS, ignore_eos=True
        )
        if made.tokens != expected(directory)[number, rule]:
            found.append(seed)
    return found
