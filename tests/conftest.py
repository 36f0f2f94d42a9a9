"""Fixtures shared by the tests: random checkpoints and engines, built once and never changed."""

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import distilling, tiny_models
from support.bundled import EXAMPLE
from support.command import add_tokenizer, export_engine
from support.harness import Harness
from support.tiny_checkpoints import FAMILIES, build

from eesd.export import engine_dir
from eesd.export.cli import main as export_main


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give a family's name, get its checkpoint directory. Copy it before changing anything in it."""

    @cache
    def directory(name: str) -> Path:
        return build(FAMILIES[name], tmp_path_factory.mktemp(name))

    return directory


@pytest.fixture(scope="module")
def traced_once() -> Iterator[None]:
    """Each graph of a module's exports is traced once only: that takes seconds."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(engine_dir, "trace", cache(engine_dir.trace))
        yield


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    """Engines of a three-layer model with 97 tokens."""
    directory = tmp_path_factory.mktemp("main")
    model = tiny_models.build(directory / "model", 97, layers=3, damping=0.3, seed=0)
    return Harness(tiny_models.export_tiny(model, directory / "plans", slots=384))


@pytest.fixture(scope="session")
def two_block_harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    """Engines of a four-layer model whose exit head has two blocks."""
    directory = tmp_path_factory.mktemp("blocks")
    model = tiny_models.build(directory / "model", 97, layers=4, damping=0.3, seed=0)
    return Harness(tiny_models.export_tiny(model, directory / "plans", slots=384, blocks=2))


@pytest.fixture(scope="session")
def five_token_harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    """Engines of a model with five tokens: few enough to enumerate every outcome."""
    directory = tmp_path_factory.mktemp("five")
    model = tiny_models.build(directory / "model", 5, layers=3, damping=0.5, seed=0)
    return Harness(tiny_models.export_tiny(model, directory / "plans", slots=64))


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A three-layer model with a tokenizer of single characters and a chat template."""
    model = tiny_models.build(tmp_path_factory.mktemp("text") / "model", 97, layers=3, damping=0.3, seed=0)
    add_tokenizer(model)
    return model


@pytest.fixture(scope="session")
def engine(text_model: Path) -> Path:
    """The text model's engines, as ``eesd-export`` writes them. Copy them before changing anything."""
    return export_engine(text_model, text_model.parent / "plans")


@pytest.fixture
def engine_copy(engine: Path, tmp_path: Path) -> Path:
    """Engines that the test may damage."""
    return shutil.copytree(engine, tmp_path / "plans")


@pytest.fixture(scope="session")
def to_learn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model for distillation and an array of rows that it wrote."""
    return distilling.build(tmp_path_factory.mktemp("learner"))


@pytest.fixture(scope="session")
def learner(to_learn: tuple[Path, Path]) -> Path:
    return to_learn[0]


@pytest.fixture(scope="session")
def own_rows(to_learn: tuple[Path, Path]) -> Path:
    return to_learn[1]


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint, exported as `make run` does."""
    directory = tmp_path_factory.mktemp("bundled") / "plans"
    options = ["--model", str(EXAMPLE / "model"), "--dtype", "float32", "--output", str(directory)]
    result = CliRunner().invoke(export_main, options)
    assert result.exit_code == 0, result.output
    return directory
