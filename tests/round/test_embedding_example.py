"""Tests of the parts of ``examples/embedding/service.py`` that run without a GPU."""

import re
import shutil
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import fake_tensorrt as fake
from support import tiny_models
from support.command import assert_refused, run

from eesd.common.errors import EESDError
from eesd.common.manifest import load_manifest
from eesd.runtime.embed import Host, open_host_engines
from eesd.runtime.engines.device import DeviceStream

EXAMPLE = Path(__file__).parents[2] / "examples/embedding/service.py"


@pytest.fixture(scope="module")
def service() -> SimpleNamespace:
    return SimpleNamespace(**run_path(str(EXAMPLE)))


def test_contexts_compile_eagerly_and_share_their_kernels(
    service: SimpleNamespace, tmp_path: Path
) -> None:
    """The fake accepts a runtime cache only with eager kernels, as EESD needs."""
    model = tiny_models.build(tmp_path / "model", 97, layers=2, damping=0.3, seed=0)
    directory = tiny_models.export_tiny(model, tmp_path / "plans", slots=96)
    fake.write_plans(directory, "tensorrt-rtx")
    manifest = load_manifest(directory)
    trt = fake.module("tensorrt-rtx")
    other = fake.module("tensorrt")
    runtime = trt.Runtime(trt.ILogger())
    draft, verify = (
        service.load_engine(runtime, directory / manifest.plans[graph.file].file)
        for graph in (manifest.draft, manifest.verify[0])
    )
    contexts = service.ContextMaker(trt)
    host = Host([verify], draft, contexts, stream=None)  # type: ignore[arg-type]  # there is none on the CPU
    engines = open_host_engines(manifest, host, [DeviceStream(torch.device("cpu"))], exact=False)
    engines.verify.prepare(engines.verify.new_kv_caches())
    assert len(verify._contexts) > 3 and len(contexts.kernels[verify]._kernels) == len(
        verify._contexts
    )
    draft = service.load_engine(other.Runtime(other.ILogger()), directory / "draft.plan")
    assert service.ContextMaker(other)(draft) is draft._contexts[-1]


def test_a_plan_that_cannot_be_loaded_is_refused(service: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "draft.plan").write_text("nonsense")
    trt = fake.module("tensorrt")
    with pytest.raises(EESDError, match=r"draft\.plan cannot be loaded"):
        service.load_engine(trt.Runtime(trt.ILogger()), tmp_path / "draft.plan")


def test_the_allocator_overrides_every_method_that_the_library_names(
    service: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documentation of the class in the bindings lists the methods. The bindings call none of
    them if one is missing."""
    trt = pytest.importorskip("tensorrt_rtx")
    named = re.search(
        r"all methods below \(([^)]*)\) must be overridden", trt.IGpuAllocator.__doc__
    )
    assert named is not None
    methods = named[1].split(", ")
    allocator: Any = service.make_allocator(trt, 0)
    assert len(methods) == 5 and set(methods) <= vars(type(allocator)).keys()

    def full(*_: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", full)
    assert (
        allocator.allocate_async(5, 256, 0, 16) is None
        and allocator.allocate_async(0, 256, 0, 16) is None
    )
    assert allocator.deallocate_async(0, 16) and allocator.reallocate(1, 256, 9) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_the_service_says_what_it_needs(
    service: SimpleNamespace, engine: Path, tmp_path: Path
) -> None:
    assert_refused(run(service.main, engine, "hello"), "has no plans; build them with: eesd-build")
    directory = shutil.copytree(engine, tmp_path / "plans")
    fake.write_plans(directory)
    assert_refused(
        run(service.main, directory, "hello"), "runs plans on an NVIDIA GPU, and there is none"
    )
