"""Fixtures that the tests share. They give random checkpoints and engines, which are built once and
never changed.

``make test`` runs the tests in two processes. Each process has a separate processor, and both use
the same built directories.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if WORKER and hasattr(os, "sched_setaffinity"):
    # The process is bound to a processor before torch and ONNX Runtime count the processors,
    # because two processes with two spinning threads each would be slower.
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[int(WORKER.removeprefix("gw")) % len(processors)]})

if not Path("/dev/nvidiactl").exists():
    # Triton reads this variable when torch imports Triton. Kernels then run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from filelock import FileLock  # noqa: E402
from support import distilling, late_gpus, tiny_models  # noqa: E402
from support.bundled import EXAMPLE  # noqa: E402
from support.command import add_tokenizer, export_engine, succeed  # noqa: E402
from support.harness import Harness  # noqa: E402
from support.lossless_checks import DRAFT_VOCAB  # noqa: E402
from support.tiny_checkpoints import FAMILIES, build  # noqa: E402
from support.without_operators import with_operators, without_operators  # noqa: E402
from torch.utils._device import _device_constructors  # noqa: E402

from eesd.common.manifest import load_manifest  # noqa: E402
from eesd.export.cli import main as export_main  # noqa: E402
from eesd.export.cpu.build import build_for_cpu  # noqa: E402
from eesd.runtime.engines import operators  # noqa: E402

Shared = Callable[[str, Callable[[Path], object]], Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-operators",
        action="store_true",
        help="as if the library of operators were not built",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide the operators before tests are collected, because some tests are skipped without
    them."""
    if config.getoption("--without-operators"):
        hidden = ExitStack()
        hidden.enter_context(without_operators())
        config.add_cleanup(hidden.close)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Returns a function that takes a name, and a second function that fills a directory. The
    returned function gives the directory, which is filled only once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if WORKER else base) / "shared"
    root.mkdir(exist_ok=True)

    def directory(name: str, fill: Callable[[Path], object]) -> Path:
        path = root / name
        with FileLock(root / f"{name}.lock"):
            if not (root / f"{name}.done").exists():
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
                with with_operators():  # The files do not depend on the test that comes first.
                    fill(path)
                (root / f"{name}.done").touch()
        return path

    return directory


@pytest.fixture(scope="session")
def planned(shared: Shared) -> late_gpus.Planned:
    """Returns a function that gives the engine directory for a setting of an LLM on fake GPUs."""
    return partial(late_gpus.directory, shared)


# fmt: off
LONG = (
    "leftovers", "bench_peers", "mutations", "quantize", "exactness", "torch_engine", "build",
    "stages", "gguf", "distill", "linked", "distill_damage", "streams", "trt_engine",
    "device_sampler", "rejection", "memory", "lossless", "text_drafts", "parity", "late_gpus",
)
# fmt: on
"""The slowest test files. They run first, so that neither process waits for the other at the end.
The first file forks its process hundreds of times, which is slow once the process is large."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}.py": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


@pytest.fixture(autouse=True)
def level_of_logging() -> Iterator[None]:
    """Restore the level of logging, which commands within a test process change."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)


TENSOR_MAKERS = _device_constructors()
"""torch caches these functions at the first use. If a test, or transformers while it loads a model,
has replaced one at that moment, transformers leaves rotary frequencies unset from then on."""


def state_of_torch() -> dict[str, object]:
    """The global state of torch in a process or thread."""
    return {
        "default type": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision of products": torch.get_float32_matmul_precision(),
        "functions that make tensors": _device_constructors.__wrapped__() == TENSOR_MAKERS,
    }


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    """A test that changes the state of torch fails itself, instead of a later test of its
    process."""
    before = state_of_torch()
    yield
    assert state_of_torch() == before, "the test left torch in another state"


@pytest.fixture(scope="session")
def family_dir(shared: Shared) -> Callable[[str], Path]:
    """Returns a function that takes the name of a family and gives its checkpoint directory. Copy
    the directory before changing it."""
    return lambda name: shared(f"family-{name}", lambda path: build(FAMILIES[name], path))


@pytest.fixture(scope="session")
def harness(shared: Shared) -> Harness:
    """Engines of a three-layer model with 97 tokens."""
    return Harness(
        shared("harness", lambda path: fill_harness(path, 97, layers=3, slots=384)) / "plans"
    )


@pytest.fixture(scope="session")
def default_harness(harness: Harness) -> Harness:
    """The same directory with the engine that users get by default."""
    return Harness(harness.directory, standard=False)


@pytest.fixture(scope="session")
def two_block_harness(shared: Shared) -> Harness:
    """Engines of a four-layer model whose exit head has two blocks."""
    return Harness(
        shared("two-blocks", lambda path: fill_harness(path, 97, layers=4, slots=384, blocks=2))
        / "plans"
    )


@pytest.fixture(scope="session")
def reduced_harness(shared: Shared) -> Harness:
    """Engines of the harness's model whose draft predicts ``DRAFT_VOCAB`` only."""
    fill = partial(
        fill_harness, vocab_size=97, layers=3, slots=384, draft_vocab=tuple(DRAFT_VOCAB.tolist())
    )
    return Harness(shared("reduced", fill) / "plans")


@pytest.fixture(scope="session")
def reduced_five_token_harness(shared: Shared) -> Harness:
    """Engines of the five-token model whose draft predicts three tokens."""
    fill = partial(
        fill_harness, vocab_size=5, layers=3, slots=64, damping=0.5, draft_vocab=(1, 3, 4)
    )
    return Harness(shared("reduced-five-tokens", fill) / "plans")


@pytest.fixture(scope="session")
def five_token_harness(shared: Shared) -> Harness:
    """Engines of a model with five tokens, few enough to enumerate every outcome."""
    return Harness(
        shared("five-tokens", lambda path: fill_harness(path, 5, layers=3, slots=64, damping=0.5))
        / "plans"
    )


def fill_harness(
    path: Path,
    vocab_size: int,
    layers: int,
    slots: int,
    damping: float = 0.3,
    blocks: int = 1,
    draft_vocab: Sequence[int] = (),
) -> None:
    model = tiny_models.build(path / "model", vocab_size, layers=layers, damping=damping, seed=0)
    top_k = min(4, len(draft_vocab) or vocab_size)
    tiny_models.export_tiny(
        model, path / "plans", slots=slots, blocks=blocks, draft_vocab=draft_vocab, top_k=top_k
    )


@pytest.fixture(scope="session")
def text_model(shared: Shared) -> Path:
    """A three-layer model with a tokenizer of single characters and a chat template."""

    def fill(path: Path) -> None:
        add_tokenizer(tiny_models.build(path / "model", 97, layers=3, damping=0.3, seed=0))

    return shared("text-model", fill) / "model"


@pytest.fixture(scope="session")
def engine(shared: Shared, text_model: Path) -> Path:
    """The text model's engines, as ``eesd-export`` writes them. Copy them before changing
    anything."""

    def fill(path: Path) -> None:
        plans = export_engine(text_model, path / "plans")
        if not operators.missing():
            build_for_cpu(plans, load_manifest(plans))

    return shared("engine", fill) / "plans"


@pytest.fixture(scope="session")
def quantized_engine(shared: Shared, text_model: Path) -> Path:
    """The same engines with the whole model in 4 bits as the draft."""
    return (
        shared(
            "quantized",
            lambda path: export_engine(text_model, path / "quantized", "--exit-head", "quantized"),
        )
        / "quantized"
    )


@pytest.fixture
def engine_copy(engine: Path, tmp_path: Path) -> Path:
    """Engines that the test may damage."""
    return shutil.copytree(engine, tmp_path / "plans")


@pytest.fixture(scope="session")
def learner(shared: Shared) -> Path:
    """A model for distillation."""
    return shared("learner", distilling.build) / "model"


@pytest.fixture(scope="session")
def own_rows(learner: Path) -> Path:
    """An array of rows that the learner wrote."""
    return learner.parent / "own.npy"


@pytest.fixture(scope="session")
def bundled(shared: Shared) -> Path:
    """The bundled checkpoint, exported as ``make run`` does."""

    def fill(path: Path) -> None:
        succeed(
            export_main,
            "--model",
            EXAMPLE / "model",
            "--dtype",
            "float32",
            "--output",
            path / "plans",
        )

    return shared("bundled", fill) / "plans"
