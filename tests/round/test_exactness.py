"""Tests that drafting changes no bit of the logits that choose a token, and that the checks for
this detect any change."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import tiny_models
from support.command import (
    add_tokenizer,
    assert_one_line,
    assert_refused,
    export_engine,
    run,
    slow_but,
    succeed,
)
from support.harness import Wrapped
from support.without_operators import needs_operators, without_operators

import eesd
from eesd.common.errors import EESDError
from eesd.common.manifest import load_manifest
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.runtime import cli, doctor
from eesd.runtime import compare as comparing
from eesd.runtime.compare import LogitRecord, compare
from eesd.runtime.decoding import round as decoding_round
from eesd.runtime.decoding.draft_tree import Node
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines import operators
from eesd.runtime.engines.backends import EngineOptions, Engines, open_engines
from eesd.runtime.engines.base import Engine, StepOutputs
from eesd.runtime.engines.exactness import Differences, Exactness
from eesd.runtime.llm import LLM, Speculation
from lab.exactness import WAYS, Row, combinations, open_with
from lab.exactness import main as bench_main
from lab.results import main as report_main

KINDS = {
    "float32": (),
    "int4": ("--quantize", "int4", "--symmetric"),
    "minimums": ("--quantize", "int4"),
    "int8": ("--quantize", "int8"),
    "two stages": ("--stages", 2),
    "no groups": (),
}
QUICK = [*(("ort", kind) for kind in KINDS), ("torch", "float32"), ("torch", "int4")]
"""Kinds that ``make test`` runs. Two are enough for torch, which dequantizes all weights when it
loads them."""
CASES = [(backend, kind) for backend in ("ort", "torch") for kind in KINDS]
PROMPT = [60, 2, 44, 44, 17, 8, 90, 31]
COUPLED = Sampling(temperature=0.9, seed=4)
SAMPLINGS = {"greedy": Sampling(), "T": COUPLED, "penalty": Sampling(repetition_penalty=1.3)}
SAMPLED = [
    *(("ort", "int4", name) for name in SAMPLINGS if name != "T"),
    *(
        (backend, kind, name)
        for backend in ("ort", "torch")
        for kind, name in zip(KINDS, cycle(SAMPLINGS), strict=False)
    ),
]
"""Engines do not depend on sampling, so only one kind of engine is tested with every sampling. Each
other kind is tested with one sampling."""
CHAIN = Speculation("fixed:k=4", guard=False, drafter="exit")
TREES = [
    Speculation("fixed:k=4", tree=3, guard=False),
    Speculation("cost-aware-ts", guard=False, tree=1),
]
Export = Callable[[str], Path]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Returns a function that gives engines of a tiny model. Tests must not change them."""

    @cache
    def directory(kind: str) -> Path:
        base = tmp_path_factory.mktemp("exact")
        heads = 4 if kind == "no groups" else 2
        model = tiny_models.build(base / "model", 97, layers=3, damping=0.3, seed=0, kv_heads=heads)
        add_tokenizer(model)
        return export_engine(
            model, base / "plans", "--max-seq-len", 320, "--max-tree-nodes", 12, *KINDS[kind]
        )

    return directory


@pytest.fixture
def standard() -> Iterator[None]:
    """Run a test as if the operators were not built: ONNX Runtime's own operators run the model."""
    with without_operators():
        yield


def one_bit_larger(tokens: Any, _: int, outputs: StepOutputs) -> None:
    if len(tokens) > 1:
        outputs.logits[0, 0] = np.nextafter(outputs.logits[0, 0], np.float32(np.inf))


class Inexact(Wrapped):
    """An engine that makes the first logit one bit larger in calls of several rows."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner, after=one_bit_larger)


def inexact(llm: LLM) -> LLM:
    return LLM(
        llm.directory,
        llm.manifest,
        llm.engines._replace(verify=Inexact(llm.engines.verify)),
        llm.speculation,
    )


@pytest.mark.parametrize(("backend", "kind"), slow_but(CASES, *QUICK))
def test_calls_of_every_size_give_the_same_bits(exported: Export, backend: str, kind: str) -> None:
    manifest = load_manifest(exported(kind))
    exactness = Exactness(manifest)
    for threads in (1, 2):
        exactness.check(
            open_engines(
                exported(kind), manifest, EngineOptions(backend, threads, draft=False)
            ).verify
        )
    assert exactness.chains.differing == 0 and not exactness.chains.kinds
    assert exactness.chains.positions > 300 and exactness.chains.calls > 100
    assert exactness.trees.positions == 24


@pytest.mark.parametrize(
    ("backend", "kind", "name"), slow_but(SAMPLED, *(case for case in SAMPLED if case[:2] in QUICK))
)
def test_drafting_chains_changes_no_bit(
    exported: Export, backend: str, kind: str, name: str
) -> None:
    """If there are more than 160 tokens, the cache grows. If a prompt is slightly longer than a
    chunk, it has chunks of two sizes."""
    llm = eesd.load(exported(kind), backend, speculation=CHAIN, threads=1)
    for prompt in (PROMPT, list(range(3, 90)) * 2):
        found = compare(llm, prompt, SAMPLINGS[name], 120, ignore_eos=True)
        assert found.divergence is None and found.drafting.accepted_tokens
        assert (found.logits.positions, found.logits.differing) == (120, 0)


@needs_operators()
@pytest.mark.parametrize("speculation", TREES, ids=["tree", "budget"])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_have_the_bits_of_chains(
    exported: Export, kind: str, speculation: Speculation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No path is cut. This holds with caches of all types, and with int8 and float32
    activations."""
    monkeypatch.setattr(decoding_round, "cut_displaced", lambda *_: 1 / 0)
    for activations, kv_cache_dtype in (
        ("int8", "float32"),
        ("float32", "float16"),
        ("int8", "int8"),
    ):
        options: dict[str, Any] = {"activations": activations, "kv_cache_dtype": kv_cache_dtype}
        llm = eesd.load(exported(kind), "ort", speculation=speculation, threads=1, **options)
        for sampling in (Sampling(), COUPLED):
            found = compare(llm, PROMPT, sampling, 60, ignore_eos=True)
            assert found.divergence is None and found.drafting.accepted_tokens
            assert (found.logits.positions, found.logits.differing) == (60, 0)


def logits_of_prompt(llm: LLM) -> NDArray[np.float32]:
    with llm.session(PROMPT) as session:
        return session.peek().copy()


@needs_operators()
def test_the_kv_cache_is_chosen(exported: Export) -> None:
    def logits(kv_cache_dtype: str | None) -> NDArray[np.float32]:
        options: Any = {} if kv_cache_dtype is None else {"kv_cache_dtype": kv_cache_dtype}
        return logits_of_prompt(
            eesd.load(exported("float32"), "ort", speculation=None, threads=1, **options)
        )

    default = logits(None)
    float32 = logits("float32")
    assert (default == float32).all()
    for rounded in (logits("float16"), logits("int8")):
        assert (rounded != float32).any()
        np.testing.assert_allclose(rounded, float32, rtol=0, atol=3e-2 * np.abs(float32).max())
    with pytest.raises(EESDError, match="kv_cache_dtype is 'float8'"):
        logits("float8")


@needs_operators()
def test_eesd_run_takes_a_kv_cache(exported: Export) -> None:
    options = (
        "--engine-dir",
        exported("int4"),
        "-p",
        "ab",
        "-n",
        20,
        "--ignore-eos",
        "--kv-cache-dtype",
        "int8",
    )
    result = succeed(cli.main, *options, "--backend", "ort", "--compare")
    assert "logits are equal, bit for bit" in result.output
    assert_refused(run(cli.main, *options, "--backend", "torch"), "torch", "KV cache")


@needs_operators()
@pytest.mark.parametrize("kind", ["int4", "minimums", "int8"])
def test_activations_are_chosen(exported: Export, kind: str) -> None:
    def logits(backend: str, activations: str | None = None) -> NDArray[np.float32]:
        return logits_of_prompt(
            eesd.load(exported(kind), backend, speculation=None, threads=1, activations=activations)
        )

    default = logits("ort")
    int8 = logits("ort", "int8")
    float32 = logits("ort", "float32")
    assert (default == int8).all() and (int8 != float32).any()
    np.testing.assert_allclose(float32, logits("torch"), rtol=0, atol=1e-4)
    np.testing.assert_allclose(int8, float32, rtol=0, atol=0.06 * np.abs(float32).max())


@pytest.mark.parametrize(
    ("backend", "name"),
    [("torch", "torch"), ("tensorrt", "tensorrt"), ("ort", "ort without this project's operators")],
)
@pytest.mark.usefixtures("standard")
def test_choices_that_a_backend_has_not_are_refused(
    exported: Export, backend: str, name: str
) -> None:
    with pytest.raises(EESDError, match=f"The backend {name} cannot choose its activations"):
        eesd.load(exported("int4"), backend, threads=1, activations="float32")
    with pytest.raises(
        EESDError, match=f"The backend {name} cannot choose the type of its KV cache"
    ):
        eesd.load(exported("int4"), backend, threads=1, kv_cache_dtype="float16")


@pytest.mark.usefixtures("standard")
@pytest.mark.parametrize("speculation", TREES, ids=["tree", "budget"])
@pytest.mark.parametrize(
    ("backend", "kind"),
    slow_but([("ort", "float32"), ("torch", "float32"), ("torch", "int4")], ("ort", "float32")),
)
def test_trees_change_logits_by_rounding_alone_and_not_where_bits_count(
    exported: Export, backend: str, kind: str, speculation: Speculation
) -> None:
    llm = eesd.load(exported(kind), backend, speculation=speculation, threads=1)
    found = compare(llm, PROMPT, COUPLED, 120, ignore_eos=True)
    assert (
        found.divergence is None and found.logits.positions == 120 and found.logits.largest < 1e-4
    )
    exact = eesd.load(exported(kind), backend, speculation=speculation, threads=1, exact=True)
    cut = compare(exact, PROMPT, COUPLED, 120, ignore_eos=True)
    assert cut.drafting.accepted_tokens and (cut.logits.positions, cut.logits.differing) == (120, 0)


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_bits_are_the_same_up_to_the_last_slot(exported: Export, backend: str) -> None:
    """Calls at the end of the cache have only spare slots for padding nodes."""
    llm = eesd.load(exported("float32"), backend, speculation=CHAIN, threads=1)
    found = compare(llm, list(range(3, 90)) * 3, Sampling(), 100, ignore_eos=True)
    assert found.plain.prompt_tokens + found.plain.new_tokens == 320
    assert (
        found.divergence is None
        and found.logits.differing == 0
        and found.logits.positions == 320 - 261
    )


def test_a_path_is_cut_at_its_first_node_in_another_slot() -> None:
    root = Node(1, index=0)
    first = Node(2, root, 1, index=1)
    second = Node(3, first, 2, index=2)
    displaced = Node(4, first, 2, index=5)
    assert decoding_round.cut_displaced([first, second], 9) == ([first, second], 9)
    assert decoding_round.cut_displaced([first, displaced, Node(6, displaced, 3, index=6)], 9) == (
        [first],
        4,
    )
    assert decoding_round.cut_displaced([displaced], 9) == ([], 4)
    assert decoding_round.cut_displaced([], 9) == ([], 9)


def test_differences_count_rows_and_see_every_bit() -> None:
    expected = np.zeros((3, 4), np.float32)
    found = expected.copy()
    found[1, 2] = -0.0
    found[2, 0] = 0.5
    differences = (
        Differences().with_rows("rows", found[:1], expected).with_rows("chunks", found, expected)
    )
    assert (
        differences.calls,
        differences.positions,
        differences.differing,
        differences.largest,
    ) == (2, 4, 2, 0.5)
    assert (
        str(differences)
        == "differ at 2 of 4 positions of 2 calls, by at most 5.0e-01 (other chunks)"
    )
    assert "equal in every bit at 1 positions" in str(
        Differences().with_rows("rows", found[:1], expected)
    )


def test_the_record_says_where_logits_differ(
    exported: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = inexact(eesd.load(exported("float32"), "ort", speculation=CHAIN, threads=1))
    found = compare(llm, PROMPT, Sampling(), 60, ignore_eos=True)
    assert found.divergence is None and 0 < found.logits.differing < 60 and found.logits.first >= 0
    assert 0 < found.logits.largest < 1e-5
    monkeypatch.setattr(comparing, "KEPT_BYTES", 0)
    hashed = compare(llm, PROMPT, Sampling(), 60, ignore_eos=True)
    assert (hashed.logits.differing, hashed.logits.largest) == (found.logits.differing, 0)


def test_hashes_take_little_memory_and_say_where_bits_differ() -> None:
    """A comparison of equal bits does not keep the logits. If the vocabulary had 50,000 tokens,
    they would take 0.2 MB per token."""
    expected = LogitRecord(whole=False)
    found = LogitRecord(expected)
    logits = np.random.default_rng(0).standard_normal((20, 50_000), np.float32)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        expected(range(20), logits)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < logits[0].nbytes
    logits[7, -1] = np.nextafter(logits[7, -1], np.float32(np.inf))
    found(range(20), logits)
    assert (found.result.positions, found.result.differing, found.result.first) == (20, 1, 7)


def test_logits_behind_other_tokens_are_not_compared() -> None:
    expected = LogitRecord()
    expected([1, 2, 3], np.eye(3, dtype=np.float32))
    found = LogitRecord(expected)
    found([1, 5], np.eye(3, dtype=np.float32)[:2])
    found([3], 2 * np.eye(3, dtype=np.float32)[2:])
    assert (found.result.positions, found.result.differing) == (2, 0)


@pytest.mark.usefixtures("standard")
def test_without_operators_nothing_is_said_of_bits(exported: Export) -> None:
    llm = eesd.load(exported("int4"), "ort", threads=1)
    stats = llm.generate(PROMPT, max_new_tokens=3).stats
    assert llm.engines.exact is stats.exact is stats.to_dict()["exact"] is None
    assert llm.engines.notice.startswith(operators.MISSING)


@needs_operators()
@pytest.mark.parametrize("kind", ["float32", "minimums", "int4"])
def test_operators_are_exact(exported: Export, kind: str) -> None:
    llm = eesd.load(exported(kind), "ort", threads=1)
    stats = llm.generate(PROMPT, max_new_tokens=3).stats
    assert (
        llm.engines.exact is stats.exact is stats.to_dict()["exact"] is True
        and not llm.engines.notice
    )


def test_one_changed_bit_is_noticed(exported: Export) -> None:
    manifest = load_manifest(exported("int4"))
    engine = Inexact(
        open_engines(exported("int4"), manifest, EngineOptions("ort", 1, draft=False)).verify
    )
    assert not Exactness(manifest).check_quickly(engine)
    exactness = Exactness(manifest)
    exactness.check(engine)
    assert exactness.chains.kinds == {"rows"}


def test_eesd_inspect_compares_bits(exported: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    result = succeed(inspect_main, exported("int4"), "--exact", "--threads", 1, "--backend", "ort")
    assert "logits equal in every bit at" in result.stdout and "tree's nodes" in result.stdout
    broken = Engines(
        Inexact(
            open_engines(
                exported("int4"), load_manifest(exported("int4")), EngineOptions("ort", 1, False)
            ).verify
        ),
        None,
    )
    monkeypatch.setattr("eesd.export.inspect.open_engines", lambda *_, **__: broken)
    result = run(inspect_main, exported("int4"), "--exact", "--json")
    assert result.exit_code == 2 and "logits differ at" in result.stderr
    assert_one_line(result.stderr.splitlines()[-1] + "\n", "depend on the number of tokens")


def test_eesd_doctor_checks_a_directory(exported: Export) -> None:
    assert (
        "equal in every bit"
        in succeed(doctor.main, "--json", "--engine-dir", exported("int8")).stdout
    )


def test_export_reports_bits(exported: Export, tmp_path: Path) -> None:
    model = exported("float32").parent / "model"
    result = succeed(
        export_main,
        "--model",
        model,
        "--exit-layer",
        1,
        "-o",
        tmp_path / "plans",
        "--max-tree-nodes",
        5,
        "--check",
    )
    assert "verify: logits of calls of 1 to 6 tokens equal in every bit" in result.stdout


@needs_operators()
def test_the_benchmark_compares_all_ways(
    exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "exactness.json"
    report = tmp_path / "results.md"
    done = succeed(bench_main, exported("int4"), "--new-tokens", 8, "-o", output)
    engines = len(combinations("ort"))
    texts = 2 * engines * (2 * 2 * (len([way for ways in WAYS.values() for way in ways]) + 2) + 8)
    assert f"{texts} texts compared, 0 differ" in done.stdout
    rows = [Row(**row) for row in json.loads(output.read_text())["rows"]]
    assert {row.kind for row in rows} == {*WAYS, "calls", "chunks", "batch", "prefix"} and not any(
        row.different for row in rows
    )
    assert {row.activations for row in rows} == {"int8", "float32"} and {
        row.threads for row in rows
    } == {1, 2}
    assert all(row.positions for row in rows)
    succeed(report_main, output, "-o", report)
    assert f"| texts that differ | **0 of {texts}**" in report.read_text()

    monkeypatch.setattr("lab.exactness.open_with", lambda *given: inexact(open_with(*given)))
    broken = succeed(bench_main, exported("float32"), "--new-tokens", 8)
    assert f"{texts // 2} texts compared, 0 differ" not in broken.stdout
