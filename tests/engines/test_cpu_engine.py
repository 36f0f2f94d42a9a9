"""Tests of the CPU engine with directories from the real export. Its results are close to the
results of the unchanged graphs, and its bits do not depend on calls, kernels or threads. Other
tests of this file check the packed directories."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper
from safetensors.numpy import load_file, save_file
from support import gguf_files, tiny_models
from support.command import (
    assert_one_line,
    assert_refused,
    contents,
    export_engine,
    run,
    slow_but,
    succeed,
)
from support.engine_dirs import edit_manifest, graph_of, record
from support.lossless_checks import DRAFT_VOCAB
from support.on_cache import OnCache

from eesd.common import integrity
from eesd.common.errors import EESDError
from eesd.common.files import directory_written_whole
from eesd.common.manifest import Manifest, load_manifest
from eesd.export.build import main as build_main
from eesd.export.cpu import build
from eesd.export.cpu.build import build_for_cpu
from eesd.export.inspect import main as inspect_main
from eesd.export.widened import reference
from eesd.runtime import doctor
from eesd.runtime.engines import cpu_build, operators
from eesd.runtime.engines.backends import EngineOptions, open_engines
from eesd.runtime.engines.base import Call, Engine, StepOutputs
from eesd.runtime.engines.cpu_build import describe_build
from eesd.runtime.engines.cpu_cache import KV_CACHE_DTYPES, CpuKVCache, slots_of
from eesd.runtime.engines.cpu_engine import CpuEngine
from eesd.runtime.engines.exactness import Exactness
from eesd.runtime.engines.ort_engine import CPU_PROVIDERS, NARROW, OrtEngine, load_session

pytestmark = pytest.mark.skipif(operators._library() is None, reason="the operators are not built")

PROMPT = 70
FAMILIES = {
    "llama-bias": (),
    "llama2": (),
    "llama3": (),
    "mistral": ("--dtype", "float32"),
    "qwen3": ("--dtype", "float32"),
    "qwen3-bias": ("--stages", 2),
    "qwen2.5-tied": ("--stages", 3),
    "llama-tied": ("--quantize", "int4"),
    "llama-head-dim": ("--quantize", "int8", "--stages", 2),
    "codellama": ("--link-weights",),
}
GGUF = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
REDUCED = "draft vocabulary"
KINDS = (*FAMILIES, *GGUF, REDUCED)
Directory = Callable[[str], Path]


@pytest.fixture(scope="module")
def directory(
    family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Directory:
    """Engines by kind. Tests must not change them."""

    @cache
    def exported(kind: str) -> Path:
        base = tmp_path_factory.mktemp("cpu")
        if kind == REDUCED:
            model = tiny_models.build(
                base / "model", 97, layers=4, damping=0.3, seed=0, head_dim=20
            )
            ids = DRAFT_VOCAB.tolist()
            return tiny_models.export_tiny(
                model, base / "plans", slots=256, blocks=2, own_lm_head=True, draft_vocab=ids
            )
        if kind in GGUF:
            model = gguf_files.write(
                base / "model.gguf", gguf_files.Spec("llama", matrices=kind, table=kind)
            )
            return export_engine(model, base / "plans", "--max-seq-len", 160)
        return export_engine(
            family_dir(kind), base / "plans", "--max-seq-len", 160, *FAMILIES[kind]
        )

    return exported


def cpu_engine(
    directory: Path, draft: bool = False, threads: int = 1, int8: bool = True, kernel: str = ""
) -> CpuEngine:
    manifest = load_manifest(directory)
    stages = [manifest.draft] if draft else manifest.verify
    return CpuEngine(build_for_cpu(directory, manifest), manifest, stages, threads, int8, kernel)


class Pass:
    """The results of two engines for one text. The engines run a prompt in two pieces, a token, a
    chain, a tree, and draft steps."""

    def __init__(self, verify: Engine, draft: Engine) -> None:
        manifest = verify.manifest
        tokens = (
            np.random.default_rng(0).integers(0, manifest.geometry.vocab_size, PROMPT + 20).tolist()
        )
        cache = verify.new_kv_caches()[0]
        cache.reserve(PROMPT + 20)
        own = OnCache(verify, cache)
        drafting = OnCache(draft, cache)
        own.prefill(tokens[:33], 0)
        own.prefill(tokens[33:PROMPT], 33)
        self.steps: list[list[NDArray[Any]]] = []
        at = PROMPT
        self._keep(drafting.forward(tokens[at : at + 2], [at, at + 1], at))
        self._keep(own.forward(tokens[at : at + 1], [at], at))
        self._keep(own.forward(tokens[at : at + 6], range(at, at + 6), at))
        seen = np.eye(6, dtype=np.bool_)
        seen[:, 0] = True
        seen[3:5, 1] = True
        seen[4, 3] = True
        seen[5, 2] = True
        depths = [0, 1, 1, 2, 3, 2]
        positions = [at + depth for depth in depths]
        self._keep(own.forward(tokens[at : at + 6], positions, at, at, seen))
        cache.compact(at + 1, [at + 2, at + 5])
        at += 3
        self._keep(own.forward(tokens[at : at + 2], [at, at + 1], at))
        self.caches = [*cache.values(0, at + 2).copy()]

    def _keep(self, outputs: StepOutputs) -> None:
        self.steps.append([outputs.logits.copy()])
        if outputs.topk_ids is not None and outputs.topk_logprobs is not None:
            self.steps[-1] += [outputs.topk_ids.copy(), outputs.topk_logprobs.copy()]

    def has_bits_of(self, other: "Pass") -> bool:
        return all(
            np.array_equal(*both)
            for mine, its in zip(self.steps, other.steps, strict=True)
            for both in zip(mine, its, strict=True)
        )

    def assert_near(self, other: "Pass", tolerance: float) -> None:
        """The errors of an array are compared with the size of all its values, because rounding to
        8 bits makes individual errors larger."""
        for ours, theirs in zip(self.steps, other.steps, strict=True):
            assert_near(ours[0], theirs[0], tolerance)
            if len(theirs) > 1 and tolerance < 1e-3:
                assert (ours[1] == theirs[1]).all()
                assert_near(ours[2], theirs[2], 10 * tolerance)
        for mine, its in zip(self.caches, other.caches, strict=True):
            assert_near(mine, its, tolerance)


def assert_near(found: NDArray[Any], expected: NDArray[Any], tolerance: float) -> None:
    assert found.shape == expected.shape
    error = np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error <= tolerance, f"off by {error:.1e}"


@pytest.mark.parametrize(
    "kind", slow_but(KINDS, "llama-bias", "qwen3-bias", "llama-tied", "Q4_K", REDUCED)
)
def test_logits_caches_and_drafts_are_near_those_of_the_untouched_graphs(
    directory: Directory, kind: str
) -> None:
    plans = directory(kind)
    manifest = load_manifest(plans)
    open_standard = reference if manifest.dtype in NARROW else OrtEngine
    expected = Pass(
        *(
            open_standard(plans, manifest, stages, 1)
            for stages in (manifest.verify, [manifest.draft])
        )
    )
    exact = Pass(cpu_engine(plans, int8=False), cpu_engine(plans, draft=True, int8=False))
    exact.assert_near(expected, 1e-5)
    rounded = Pass(cpu_engine(plans), cpu_engine(plans, draft=True))
    rounded.assert_near(expected, 0.2)
    chosen = manifest.quantization
    same = bool((rounded.steps[3][0] == exact.steps[3][0]).all())
    assert same != bool(chosen.layers or chosen.head or chosen.tensors), (
        "activations are int8 only with quantized weights"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are Linux's")
def test_weights_are_copied_to_large_pages_where_memory_is_free(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy does not change if the file changes. If there is little free memory, the file stays
    mapped. It gives the same bits."""
    plans = shutil.copytree(directory("llama-tied"), tmp_path / "plans")
    weights = build_for_cpu(plans, load_manifest(plans)) / cpu_build.WEIGHTS
    with monkeypatch.context() as little:
        little.setattr(operators, "available_memory", lambda: 0)
        mapped = cpu_engine(plans), cpu_engine(plans, draft=True)
    copied = cpu_engine(plans), cpu_engine(plans, draft=True)
    expected = Pass(*mapped)
    assert Pass(*copied).has_bits_of(expected)
    with weights.open("r+b") as file:
        file.write(bytes(weights.stat().st_size))
    assert Pass(*copied).has_bits_of(expected) and not Pass(*mapped).has_bits_of(expected)


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float32"])
@pytest.mark.parametrize(
    "kind",
    slow_but(
        ("llama-bias", "qwen3-bias", "llama-tied", "Q4_K", REDUCED), "qwen3-bias", "llama-tied"
    ),
)
def test_bits_are_equal_in_chains_and_trees(directory: Directory, kind: str, int8: bool) -> None:
    """A single :class:`Exactness` checks all kernels. Every other kernel must give the bits of the
    first kernel."""
    exactness = Exactness(load_manifest(directory(kind)))
    for name, threads in [("", 1), ("", 2), *((name, 1) for name in operators.supported())]:
        exactness.check(cpu_engine(directory(kind), threads=threads, int8=int8, kernel=name))
    assert not exactness.chains.differing, exactness.chains
    assert not exactness.trees.differing, exactness.trees
    assert exactness.trees.positions


@pytest.fixture(scope="module")
def manifest(directory: Directory) -> Manifest:
    return load_manifest(directory(REDUCED))


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_a_cache_keeps_what_is_filled(manifest: Manifest, dtype: str) -> None:
    kv_cache = CpuKVCache(manifest, dtype)
    random = np.random.default_rng(0)
    geometry = manifest.geometry
    shape = manifest.num_caches, 2, geometry.num_kv_heads
    assert (
        kv_cache.address % 4096 == 0
        and kv_cache.slots == slots_of(manifest)
        and kv_cache.slots % 16 == 0
    )
    size = geometry.head_dim + 4 * (dtype == "int8")  # each row's scale
    truth = np.zeros((*shape, kv_cache.slots, size), dtype)
    assert kv_cache.slot_bytes == truth.nbytes // kv_cache.slots
    assert (kv_cache.values(0, kv_cache.slots) == truth).all() and kv_cache.values(
        0, 1
    ).dtype == dtype
    for start, count in ((0, 1), (15, 2), (16, 16), (3, 60), (kv_cache.slots - 5, 5), (40, 0)):
        values = random.normal(0, 30, (*shape, count, size)).astype(dtype)
        kv_cache.fill(start, values)
        truth[..., start : start + count, :] = values
        assert (kv_cache.values(start, start + count) == values).all()
    for start, sources in ((5, [5, 7, 30]), (14, [20, 21, 40, 62]), (0, [1])):
        kv_cache.compact(start, sources)
        truth[..., start : start + len(sources), :] = truth[..., sources, :].copy()
    assert (kv_cache.values(0, kv_cache.slots) == truth).all()
    if dtype == "int8":
        one = np.full((*shape, 1, 4), [*np.array([0.25], np.float32).view(np.int8)], np.int8)
        kv_cache.fill(0, np.concatenate((truth[..., :1, :-4], one), -1))
        truth = kv_cache.values(0, 1)[..., :-4] * np.float32(0.25)
    for layer in range(manifest.num_caches):
        with np.errstate(over="ignore"):  # of random scales
            keys, values = (part[0, :, : truth.shape[3]] for part in kv_cache.read(layer))
        assert (keys == truth[layer, 0]).all() and (values == truth[layer, 1]).all()
    other = CpuKVCache(manifest, dtype)
    other.fill(0, kv_cache.values(0, 37))
    assert (other.values(0, 37) == kv_cache.values(0, 37)).all() and not other.values(37, 48).any()


def test_a_cache_has_limits(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    kv_cache = CpuKVCache(manifest)
    kv_cache.reserve(manifest.max_seq_len)
    with pytest.raises(EESDError, match="do not fit the cache"):
        kv_cache.reserve(manifest.max_seq_len + 1)
    kv_cache.fill(0, np.ones_like(kv_cache.values(0, 9)))
    kv_cache.reset()
    kv_cache.reserve(9)
    monkeypatch.setattr("eesd.runtime.engines.cpu_cache.KEPT", 0)
    kv_cache.reset()
    assert not kv_cache.values(0, kv_cache.slots).any(), "the pages were not given back"


@pytest.fixture
def plans(directory: Directory, tmp_path: Path) -> Path:
    """Engines without packed weights, which the test may change."""
    return shutil.copytree(
        directory("llama-tied"), tmp_path / "plans", ignore=shutil.ignore_patterns("cpu-*")
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories that were written. Some of them may be incomplete."""
    written: list[Path] = []
    write = build._write

    def note(directory: Path, manifest: Manifest, place: Path) -> None:
        written.append(place)
        write(directory, manifest, place)

    monkeypatch.setattr(build, "_write", note)
    return written


def test_a_directory_is_built_once(plans: Path, made: list[Path]) -> None:
    manifest = load_manifest(plans)
    place = build_for_cpu(plans, manifest)
    assert place.parent == plans and place.name.startswith("cpu-")
    before = contents(place)
    assert build_for_cpu(plans, manifest) == place and len(made) == 1
    for name in sorted(before):
        for damaged in (None, (place / name).read_bytes()[:-2]):
            if damaged is None:
                (place / name).unlink()
            else:
                (place / name).write_bytes(damaged)
            assert build_for_cpu(plans, load_manifest(plans)) == place
            assert contents(place) == before, name
    assert len(made) == 2 * len(before) + 1


def flip(file: Path, share: float) -> None:
    """Change the byte at this share of a file."""
    data = bytearray(file.read_bytes())
    data[int(share * len(data))] ^= 1
    file.write_bytes(data)


def assert_unverified(plans: Path, *words: str) -> None:
    result = run(inspect_main, plans, "--verify")
    assert result.exit_code == 2
    assert_one_line(result.stderr, *words)


@pytest.mark.parametrize("name", [cpu_build.WEIGHTS, "draft.onnx", "verify.onnx"])
def test_a_changed_byte_of_a_build_is_noticed(plans: Path, name: str) -> None:
    """``--verify`` detects a changed byte in every file. Loading detects it only in small files,
    because only these are hashed completely."""
    manifest = load_manifest(plans)
    file = build_for_cpu(plans, manifest) / name
    succeed(inspect_main, plans, "--verify")
    for share in (0, 0.4, 0.999):
        flip(file, share)
        assert_unverified(
            plans,
            f"{file} was changed after it was written",
            f"eesd-build --target cpu {plans} --force",
        )
        with pytest.raises(EESDError, match="is not the file that was written there"):
            open_engines(plans, manifest, EngineOptions("ort", 1))
        flip(file, share)
    succeed(inspect_main, plans, "--verify")
    (file.parent / cpu_build.FILES).unlink()
    assert_unverified(plans, f"{cpu_build.FILES} is missing")


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_weights_of_another_model_are_noticed_when_they_are_loaded(
    family_dir: Directory, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large files are compared by samples. The files of the other model have the same sizes."""
    monkeypatch.setattr(integrity, "_SAMPLES", 4)
    model = shutil.copytree(family_dir("llama-tied"), tmp_path / "model")
    for file in model.glob("*.safetensors"):
        tensors = {name: -values for name, values in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    options = ("--max-seq-len", 160, *FAMILIES["llama-tied"])
    plans, other = (
        export_engine(path, tmp_path / name, *options)
        for path, name in ((family_dir("llama-tied"), "same"), (model, "other"))
    )
    manifests = load_manifest(plans), load_manifest(other)
    place, its = (
        build_for_cpu(*one) if backend == "ort" else one[0]
        for one in zip((plans, other), manifests, strict=True)
    )
    (place / "weights.bin").write_bytes((its / "weights.bin").read_bytes())
    with pytest.raises(EESDError, match=r"weights\.bin is not the file that was written there"):
        open_engines(plans, load_manifest(plans), EngineOptions(backend, 1))
    assert_unverified(plans, "weights.bin was changed")


def test_another_export_has_another_build_for_cpu(
    plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A different layout also has a different build. The new build replaces the old build, but a
    directory that EESD did not make is kept."""
    manifest = load_manifest(plans)
    first = build_for_cpu(plans, manifest)
    mine = shutil.copytree(first, plans / f"cpu-{'0' * 16}")
    (mine / "notes.txt").write_text("mine")
    monkeypatch.setattr(cpu_build, "LAYOUT", 999)
    second = build_for_cpu(plans, manifest)
    assert second != first and {*plans.glob("cpu-*")} == {second, mine}
    raw = json.loads((plans / "manifest.json").read_text())
    edit_manifest(plans, "files/verify.onnx/sha256", raw["files"]["draft.onnx"]["sha256"])
    assert cpu_build.place_of(plans, load_manifest(plans)) not in (first, second)


def test_a_directory_that_is_not_built_says_what_to_run(plans: Path, made: list[Path]) -> None:
    words = f"{plans} is not built for the CPU; run: eesd-build --target cpu {plans}"
    with pytest.raises(EESDError, match=re.escape(words)):
        open_engines(plans, load_manifest(plans), EngineOptions("ort", 1, draft=False))
    assert not made and "built for the CPU" in succeed(build_main, "--target", "cpu", plans).stdout
    open_engines(plans, load_manifest(plans), EngineOptions("ort", 1, draft=False))
    for force in ((), ("--force",)):
        succeed(build_main, "--target", "cpu", plans, *force)
        assert len(made) == 1 + len(force)
    assert_refused(
        run(build_main, "--target", "cpu", plans, "--batch", 2), "takes no option but --force"
    )


def test_a_directory_that_cannot_be_written_is_not_built(
    plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(plans, monkeypatch)
    with pytest.raises(EESDError, match="cannot be written"):
        build_for_cpu(plans, load_manifest(plans))
    assert not list(plans.glob("cpu-*"))


def test_where_the_build_is_is_shown(plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        return "".join(succeed(inspect_main, plans).stdout.split())

    monkeypatch.setenv("COLUMNS", "400")
    assert "buildfortheCPU" not in shown() and not list(plans.glob("cpu-*")), (
        "it was made only to be shown"
    )
    place = build_for_cpu(plans, load_manifest(plans))
    assert f"buildfortheCPU│{place}(" in shown()
    assert doctor.engines(plans)["build for the CPU"] == describe_build(place)


def forbid(forbidden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions would not stop the superuser, who may run the tests."""
    write = directory_written_whole

    def refuse(place: Path, foreign: Callable[[Path], str]) -> Any:
        if place.is_relative_to(forbidden):
            raise PermissionError(13, f"Permission denied: {place}")
        return write(place, foreign)

    monkeypatch.setattr(build, "directory_written_whole", refuse)


def test_asking_for_kernels_changes_no_session_in_the_making(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads may load models. The choice of kernels is set for the whole process, and is read
    while a session is made."""
    plans = directory("llama-tied")
    made = ort.InferenceSession
    asked: list[str] = []
    others: list[Thread] = []

    def make(*arguments: Any, **options: Any) -> Any:
        others.append(
            Thread(target=lambda: asked.extend([operators.missing(), *operators.supported()]))
        )
        others[-1].start()
        others[-1].join(1)  # the thread waits for this session
        return made(*arguments, **options)

    def logits(int8: bool) -> bytes:
        engine = cpu_engine(plans, int8=int8)
        [kv_cache] = engine.new_kv_caches()
        kv_cache.reserve(3)
        return engine.forward([Call(kv_cache, [5, 9, 3], range(3), 0)])[0].logits.tobytes()

    expected = logits(int8=False)
    other = logits(int8=True)
    assert expected != other
    monkeypatch.setattr(ort, "InferenceSession", make)
    assert logits(int8=False) == expected
    for other_thread in others:
        other_thread.join()
    kernels = operators.supported()
    assert kernels and asked == ["", *kernels] * len(others)


def test_several_may_build_at_once(plans: Path, made: list[Path]) -> None:
    manifest = load_manifest(plans)

    def make(_: int) -> Path:
        place = build_for_cpu(plans, manifest)
        CpuEngine(place, manifest, manifest.verify, 1)
        return place

    with ThreadPoolExecutor(4) as pool:
        places = {*pool.map(make, range(4))}
    assert places == {cpu_build.find_build(plans, manifest)} and len(made) == 1
    assert len(list(plans.glob("cpu-*"))) == 1


def put(plans: Path, graph: str, model: onnx.ModelProto) -> None:
    """Write a graph, and record its size and hash in the manifest."""
    (plans / graph).write_bytes(model.SerializeToString())
    record(plans, graph)


def matrix(model: onnx.ModelProto) -> onnx.TensorProto:
    """Returns a weight that only this graph has. It is not at the beginning of its file."""
    found: list[onnx.TensorProto] = [
        tensor for tensor in model.graph.initializer if tensor.name.endswith("o_proj.weight")
    ]
    return found[-1]


def renamed(model: onnx.ModelProto) -> None:
    matrix(model).name += "_other"


def moved(model: onnx.ModelProto) -> None:
    next(entry for entry in matrix(model).external_data if entry.key == "offset").value = str(
        1 << 40
    )


def elsewhere(model: onnx.ModelProto) -> None:
    next(
        entry for entry in matrix(model).external_data if entry.key == "location"
    ).value = "../other.bin"


def other_shape(model: onnx.ModelProto) -> None:
    matrix(model).dims[0] += 1


def other_type(model: onnx.ModelProto) -> None:
    matrix(model).data_type = onnx.TensorProto.DOUBLE


@pytest.mark.parametrize("damage", [renamed, moved, elsewhere, other_shape, other_type])
@pytest.mark.parametrize("graph", ["verify.onnx", "draft.onnx"])
def test_graphs_that_do_not_fit_the_manifest_are_refused(
    plans: Path, graph: str, damage: Callable[[onnx.ModelProto], None]
) -> None:
    model = graph_of(plans, graph)
    damage(model)
    put(plans, graph, model)
    with pytest.raises(
        EESDError, match="do not fit its manifest; export the model again"
    ) as caught:
        build_for_cpu(plans, load_manifest(plans))
    assert "\n" not in str(caught.value)
    assert not list(plans.glob("cpu-*")), "something half made was left"


def test_a_graph_that_was_changed_is_refused_although_it_was_packed(plans: Path) -> None:
    manifest = load_manifest(plans)
    build_for_cpu(plans, manifest)
    data = bytearray((plans / "draft.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (plans / "draft.onnx").write_bytes(data)
    with pytest.raises(EESDError, match=r"draft.onnx is not the graph that the manifest describes"):
        build_for_cpu(plans, manifest)


def test_scales_that_are_not_finite_are_refused(plans: Path) -> None:
    manifest = load_manifest(plans)
    scales = next(
        t for t in graph_of(plans, "verify.onnx").graph.initializer if t.name.endswith(".scales")
    )
    offset = next(int(entry.value) for entry in scales.external_data if entry.key == "offset")
    for value in (np.inf, np.nan):
        kind = {1: np.float32, 10: np.float16}[scales.data_type]
        with (plans / "weights.bin").open("r+b") as file:
            file.seek(offset)
            file.write(np.array([value], kind).tobytes())
        with pytest.raises(EESDError, match="do not fit its manifest"):
            build_for_cpu(plans, manifest)


def test_a_graph_on_disk_must_not_have_operators_of_this_project(plans: Path) -> None:
    """Exported graphs are standard ONNX, without nodes of this project's domain."""
    model = graph_of(plans, "verify.onnx")
    node = helper.make_node(
        "Embed", [model.graph.input[0].name], ["never"], domain=operators.DOMAIN
    )
    model.graph.node.insert(0, node)
    model.opset_import.append(helper.make_opsetid(operators.DOMAIN, 1))
    put(plans, "verify.onnx", model)
    manifest = load_manifest(plans)
    operators.fastest()
    with pytest.raises(
        EESDError, match=r"ONNX Runtime cannot load .*verify.onnx \(.*\); export again"
    ) as caught:
        load_session(plans, manifest, manifest.verify[0], 1, CPU_PROVIDERS)
    assert "eesd" in str(caught.value) and "\n" not in str(caught.value)


def test_a_packed_graph_that_is_damaged_is_refused(plans: Path) -> None:
    manifest = load_manifest(plans)
    place = build_for_cpu(plans, manifest)
    path = place / manifest.verify[0].file
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(EESDError, match="run: eesd-build --target cpu --force"):
        CpuEngine(place, manifest, manifest.verify, 1)
