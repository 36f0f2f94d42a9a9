"""The comparison with other runtimes: real workers of EESD, and made-up peers for what goes
wrong."""

import ast
import json
import re
import sys
from contextlib import closing
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from support import gguf_files
from support.command import assert_refused, listing, run, succeed

from eesd.runtime.engines import operators
from eesd.runtime.llm import load
from lab.peers.batches import entries
from lab.peers.cli import main
from lab.peers.contestants import PEERS, WORKERS, Contestant, Peer, chosen, of_variant
from lab.peers.convert import Work
from lab.peers.measure import Comparison, Options
from lab.peers.passes import Passes
from lab.peers.process import PeerError, Process, busy_threads
from lab.peers.quality import compare
from lab.peers.results import Load, Prompt, Quality, Result, Run
from lab.peers.table import markdown
from lab.peers.texts import choose_prompts
from lab.peers.workers.ort_genai_peer import nearest
from lab.results import main as draw

FEW = (
    "--short",
    2,
    "--short-tokens",
    8,
    "--long",
    1,
    "--long-tokens",
    24,
    "-n",
    6,
    "--processes",
    1,
    "--threads",
    1,
)
TEXTS = [
    "the first text is read",
    "short",
    "another text to go on with",
    "and a third one, long enough for all of this",
]

FAKE = """
import os, sys, threading, time
from pathlib import Path
PACKAGE = "pytest"
done = threading.Semaphore(0)

def convert(model, output, variant):
    Path(output).mkdir(exist_ok=True)
    Path(output, "converted").write_text(model + variant)

def spin():
    while time.thread_time() < 0.5:
        pass
    done.release()
    time.sleep(60)  # as the threads of a pool stay

def load(path, options):
    print("a library talks")
    return Fake(Path(path), options)

class Fake:
    def __init__(self, path, options):
        self.path, self.variant = path, options["variant"]

    def generate(self, prompt, count):
        with (self.path / "calls").open("a") as file:
            file.write(f"{self.variant} {prompt[0]} {count}\\n")
        trouble = self.path / self.variant
        if trouble.exists() and prompt[0] == int(trouble.read_text()):
            if self.variant == "broken":
                raise ValueError("out of\\nluck")
            if self.variant == "dies":
                print("last words", file=sys.stderr)
                os._exit(3)
            if self.variant == "hangs":
                time.sleep(60)
            if self.variant == "stops":
                return prompt[:1], [0.5]
            if self.variant == "crowds":
                crowd = [threading.Thread(target=spin, daemon=True) for _ in range(3)]
                for thread in crowd:
                    thread.start()
                done.acquire(), done.acquire(), done.acquire()
        return [7] * count, [0.5 * (n + 1) for n in range(count)]

    def logits(self, tokens):
        return None
"""


@pytest.fixture
def work(text_model: Path, tmp_path: Path) -> Path:
    """A work directory with nothing converted; the peers' interpreter is this one."""
    directory = tmp_path / "work"
    directory.mkdir()
    Work(str(text_model), sys.executable, 1).save(directory)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS)
    )
    return directory


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Contestant]:
    """Contestants that fail in the way of their name on the prompt that a file of that name
    says."""
    file = tmp_path / "fake.py"
    file.write_text(FAKE)
    monkeypatch.setattr("lab.peers.measure.REST_SECONDS", 0)
    monkeypatch.setitem(PEERS, "fake", Peer(str(file), ()))
    names = ("sound", "broken", "dies", "hangs", "stops", "crowds")
    return {name: Contestant("fake", name, "plain", "Q4_0", str(tmp_path)) for name in names}


def comparison(
    contestants: list[Contestant], path: Path, result: Result | None = None
) -> Comparison:
    prompts = [Prompt(f"short-{n}", "short", [n, 50]) for n in (1, 2, 3)]
    options = Options(3, (3, 2), (0, 1), 1, 1, "prompts")
    fresh = Result(options.to_dict(), {"name": "m", "exit_layer": 1}, contestants, prompts)
    return Comparison(result or fresh, options, {"fake": sys.executable}, 600, path, lambda _: None)


def timed_calls(directory: Path) -> list[str]:
    """Variant and first token of the measured calls, without warm-ups, whose prompts are
    reversed."""
    lines = [line.split() for line in (directory / "calls").read_text().splitlines()]
    return [f"{variant} {token}" for variant, token, _ in lines if token != "50"]


def test_eesd_decodes_as_it_does_alone_and_is_reported(
    engine: Path, work: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "results.json"
    text = tmp_path / "held.txt"
    text.write_text("some other words that nobody has seen " * 3)
    options = ("--prompts", tmp_path / "prompts.jsonl", "--quality-text", text, "--window", 32)
    done = succeed(
        main, "run", "--work", work, "--eesd", "F32", engine, "-o", output, *options, *FEW
    )

    result = Result.load(output)
    assert result.complete and not result.skipped
    names = ["EESD F32", "EESD F32, drafting"]
    assert [c.name for c in result.contestants] == names
    assert [(p.id, len(p.tokens)) for p in result.prompts] == [
        ("short-1", 8),
        ("short-2", 8),
        ("long-1", 24),
    ]
    llm = load(engine, speculation=None, threads=1)
    for prompt in result.prompts:
        expected = llm.generate(prompt.tokens, max_new_tokens=6, ignore_eos=True).tokens
        found = {r.contestant: r for r in result.runs if r.prompt == prompt.id}
        assert sorted(found) == sorted(names)
        assert all(
            r.tokens == expected and r.first_seconds > 0 and r.decode_seconds > 0
            for r in found.values()
        )
    assert [load.contestant for load in result.loads] == names
    assert all(
        load.seconds > 0 and load.peak_bytes and load.anonymous_bytes for load in result.loads
    )

    assert result.quality_reference == "EESD F32"
    assert [q.contestant for q in result.qualities] == ["EESD F32"]
    assert all(
        q.positions == 96 and abs(q.divergence) < 1e-6 and q.agreement == 1
        for q in result.qualities
    )

    table = "\n".join(markdown(result))
    assert table in done.stdout and "quality, EESD F32" in done.stdout
    row = next(line for line in table.splitlines() if line.startswith("| EESD F32, drafting |"))
    assert row.endswith("| 6 of 6 |") and len(re.findall(r"\*\*\d+\.\d\d\*\*", row)) == 4


def test_everybody_decodes_each_prompt_in_a_rotating_order(
    fakes: dict[str, Contestant], tmp_path: Path
) -> None:
    measured = comparison([fakes["sound"], fakes["broken"]], tmp_path / "r.json")
    measured.run([])
    assert timed_calls(tmp_path) == [
        "sound 1",
        "broken 1",
        "broken 2",
        "sound 2",
        "sound 3",
        "broken 3",
    ]
    assert measured.result.complete and len(measured.result.runs) == 6
    assert measured.result.runs[0] == Run("fake sound", 0, "short-1", 0.5, 1.0, [7, 7, 7])
    assert measured.result.runs[0].rate == 2.0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "generate: ValueError: out of luck"),
        ("dies", "generate: ended (last words)"),
        ("stops", "generate: RuntimeError: gave 1 tokens with 1 times instead of 3"),
    ],
)
def test_who_fails_is_left_out_and_the_others_go_on(
    name: str, reason: str, fakes: dict[str, Contestant], tmp_path: Path
) -> None:
    (tmp_path / name).write_text("2")
    measured = comparison([fakes["sound"], fakes[name]], tmp_path / "r.json")
    measured.run([])
    found = Result.load(tmp_path / "r.json")
    assert found.skipped == {f"fake {name}": reason} and not found.complete
    assert [(r.contestant, r.prompt) for r in found.runs if r.contestant == "fake sound"] == [
        ("fake sound", f"short-{n}") for n in (1, 2, 3)
    ]
    assert [r.prompt for r in found.runs if r.contestant == f"fake {name}"] == ["short-1"]
    assert f"* fake {name}: {reason}" in markdown(found)


def test_who_computes_with_other_threads_is_refused(
    fakes: dict[str, Contestant], tmp_path: Path
) -> None:
    (tmp_path / "crowds").write_text("2")
    measured = comparison([fakes["sound"], fakes["crowds"]], tmp_path / "r.json")
    measured.run([])
    assert measured.result.skipped == {"fake crowds": "computed with 3 threads instead of 1"}
    assert (
        {run.contestant for run in measured.result.runs}
        == {load.contestant for load in measured.result.loads}
        == {"fake sound"}
    )


def test_threads_that_hardly_compute_are_not_counted() -> None:
    assert busy_threads({"1": 5.0, "2": 1.0}, {"1": 7.0, "2": 2.5, "3": 0.4}) == 2
    assert busy_threads({}, {}) == 0


@pytest.mark.slow
def test_a_gguf_file_is_compared_with_its_dequantized_weights(tmp_path: Path) -> None:
    file = gguf_files.write(
        tmp_path / "m.gguf", gguf_files.Spec("llama", table="Q8_0", matrices="Q4_0")
    )
    base = ("--model", file, "-o", tmp_path / "work", "--only", "EESD*", "--only", "llama.cpp gguf")
    assert_refused(run(main, "convert", *base), "has no exit head", "--exit-layer")
    succeed(main, "convert", *base, "--exit-layer", 1, "--max-seq-len", 64)
    record = Work.load(tmp_path / "work")
    assert sorted(record.made) == ["EESD F32", "EESD gguf", "llama.cpp gguf"]
    assert {c.peer for c in record.contestants(tmp_path / "work", {})} == {"EESD", "llama.cpp"}
    (tmp_path / "held.txt").write_text("".join(gguf_files.CHARACTERS[:40]))
    texts = [gguf_files.CHARACTERS[n] * 40 for n in range(5)]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
    )
    sizes = (
        "--longest",
        1,
        "--longest-tokens",
        30,
        "--quality-text",
        tmp_path / "held.txt",
        "--window",
        20,
    )
    output = tmp_path / "r.json"
    common = (
        "--work",
        tmp_path / "work",
        "-o",
        output,
        "--prompts",
        tmp_path / "prompts.jsonl",
        "--only",
        "EESD gguf*",
    )
    done = succeed(main, "run", *common, *FEW, *sizes)
    result = Result.load(output)
    assert [c.name for c in result.contestants] == [
        "EESD gguf",
        "EESD gguf, drafting",
    ] and result.complete
    assert result.quality_reference == "EESD F32"
    assert [(q.contestant, q.positions) for q in result.qualities] == [
        ("EESD gguf", 40)
    ] and result.qualities[0].divergence < 0.1
    assert "tokens/s after 30" in done.stdout


@pytest.mark.parametrize(
    ("kind", "table", "wanted"),
    [
        ("Q4_0", "F32", "int4 is_symmetric=true matmul_mixed_precision=last_matmul:int8"),
        ("Q4_1", "Q4_0", "int4 is_symmetric=false"),
        ("Q8_0", "Q8_0", "int8"),
        ("F16", "F32", "fp32"),
    ],
)
def test_the_nearest_form_follows_the_types_of_the_file(
    kind: str, table: str, wanted: str, tmp_path: Path
) -> None:
    file = gguf_files.write(
        tmp_path / "m.gguf", gguf_files.Spec("llama", tied=True, table=table, matrices=kind)
    )
    precision, options = nearest(str(file))
    shown = [option for option in options if option not in ("block_size=32", "algo_config=k_quant")]
    assert " ".join([precision, *shown]) == wanted


def test_a_resumed_run_measures_only_the_rounds_that_are_missing(
    fakes: dict[str, Contestant], tmp_path: Path
) -> None:
    (tmp_path / "broken").write_text("2")
    both = [fakes["sound"], fakes["broken"]]
    comparison(both, tmp_path / "r.json").run([])
    (tmp_path / "broken").unlink()
    (tmp_path / "calls").unlink()
    kept = Result.load(tmp_path / "r.json")
    before = [r for r in kept.runs if r.prompt == "short-1"]
    again = comparison(both, tmp_path / "r.json", kept)
    again.run([])
    assert sorted(timed_calls(tmp_path)) == ["broken 2", "broken 3", "sound 2", "sound 3"]
    assert again.result.complete and not again.result.skipped
    assert [r for r in again.result.runs if r.prompt == "short-1"] == before and len(
        again.result.runs
    ) == 6
    assert len(again.result.loads) == 2


@pytest.mark.slow
def test_a_peer_that_is_not_installed_is_skipped_with_its_reason(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "m.gguf", gguf_files.Spec("llama"))
    work = tmp_path / "work"
    options = ("--model", file, "--exit-layer", 1, "-o", work)
    done = succeed(main, "convert", *options, "--only", "llama.cpp F32", "--only", "EESD F32")
    record = Work.load(work)
    assert listing(work) == ["EESD-F32", "work.json"] and record.made["EESD F32"]["bytes"] > 1000
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["llama.cpp F32", "EESD F32"]
    assert lines[0].startswith("llama.cpp F32: skipped; convert: ModuleNotFoundError")
    again = succeed(main, "convert", *options, "--only", "EESD F32")
    assert again.stdout == "EESD F32: there already\n"
    missing = succeed(
        main, "convert", *options, "--only", "ort-genai F32", "--peer-python", tmp_path / "none"
    )
    assert (
        "ort-genai F32: skipped; llama.cpp F32 is missing, which is the file to read"
        in missing.stdout
    )
    missing = succeed(
        main, "convert", *options, "--only", "llama.cpp F32", "--peer-python", tmp_path / "none"
    )
    assert "cannot be started (No such file or directory)" in missing.stdout
    peers = {(c.peer, c.variant) for c in Work.load(work).contestants(work, {})}
    assert peers == {("EESD", "F32")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--eesd", "small", "."), ("'small'", "Q4_0-small")),
        (("--only", "rwkv*"), ("--only 'rwkv*'", "EESD F32")),
        (("--short-tokens", 500), ("0 texts of at least 500 tokens", "3 wanted")),
        (("--short", 0, "--long", 0), ("nothing to measure",)),
        (("--long", 9, "--long-tokens", 50, "--short-tokens", 4), ("too few for 9 prompts of 50",)),
        (("--prompts", "missing.jsonl"), ("missing.jsonl",)),
        (("--quality-text", "missing.txt"), ("missing.txt",)),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    options: tuple[object, ...], words: tuple[str, ...], work: Path, engine: Path, tmp_path: Path
) -> None:
    few = () if "--short-tokens" in options else ("--short-tokens", 8)
    base = (
        "--work",
        work,
        "-o",
        tmp_path / "r.json",
        "--prompts",
        tmp_path / "prompts.jsonl",
        "--short",
        3,
        "--long",
        0,
        *few,
    )
    assert_refused(run(main, "run", *base, "--eesd", "F32", engine, *options), *words)
    assert not (tmp_path / "r.json").exists()


def test_results_are_neither_overwritten_nor_mixed_nor_misread(
    work: Path, engine: Path, tmp_path: Path
) -> None:
    assert_refused(
        run(main, "run", "--work", tmp_path / "empty"), "work.json is missing", "convert"
    )
    result = tmp_path / "r.json"
    base = (
        "--work",
        work,
        "-o",
        result,
        "--prompts",
        tmp_path / "prompts.jsonl",
        "--eesd",
        "F32",
        engine,
        *FEW,
    )
    comparison([], result).run([])
    before = result.read_bytes()
    assert_refused(run(main, "run", *base), "--resume", "--overwrite")
    assert_refused(run(main, "run", *base, "--resume"), "other options", "--overwrite")
    assert result.read_bytes() == before
    result.write_text(before.decode().replace('"schema": 1', '"schema": 9'))
    assert_refused(run(main, "run", *base, "--resume"), "schema 9")
    result.write_text(
        before.decode().replace('"new_tokens"', '"new"').replace('"prompts": [', '"prompt": [')
    )
    assert_refused(run(main, "run", *base, "--resume"), "damaged")
    result.write_text("{}")
    assert_refused(run(main, "run", *base, "--resume"), "not a comparison")
    assert_refused(
        run(main, "convert", "--model", engine.parent / "none", "-o", work),
        "none is not a file",
        "GGUF",
    )


def test_ratios_are_paired_and_medians_are_shown(tmp_path: Path) -> None:
    eesd = of_variant("EESD", "Q4_0", "Q4_0", Path("e"))[0]
    peer = of_variant("llama.cpp", "Q4_0", "Q4_0", Path("l"))[0]
    prompts = [Prompt("short-1", "short", [1, 2]), Prompt("short-2", "short", [3, 4])]
    options = Options(11, (2, 2), (0, 1), 1, 2, "p").to_dict()
    result = Result(options, {"name": "m", "exit_layer": 1}, [eesd, peer], prompts, complete=True)
    tokens = [5] * 11
    # EESD takes twice the time of the peer on one prompt, four times on the other.
    for prompt, seconds, factor in (("short-1", 1.0, 2), ("short-2", 0.1, 4)):
        result.runs.append(Run(eesd.name, 0, prompt, 0.3, seconds * factor, tokens))
        result.runs.append(Run(peer.name, 0, prompt, 0.1, seconds, tokens))
    result.loads.append(Load(peer.name, 0, 1.25, 3_000_000, 2_000_000))
    result.sizes["llama.cpp Q4_0"] = 4_000_000
    result.qualities.append(Quality(peer.name, 64, 0.0123, 0.75))
    table = "\n".join(markdown(result))
    assert "| EESD Q4_0 | 15 (5 to 25) |  | 300 (300 to 300) |  |  |  |  |  |  |" in table
    speeds = (
        "| llama.cpp Q4_0 | 55 (10 to 100) | **0.38** (0.25 to 0.50) | 100 (100 to 100) | "
        "**3.00** (3.00 to 3.00) |"
    )
    assert f"{speeds} 1.25 | 3 | 2 | 4 |  |" in table
    assert "| llama.cpp Q4_0 | 0.0123 | 75.0% | 4 |" in table
    assert "**Incomplete**" not in table
    result.save(tmp_path / "peers.json")
    succeed(draw, tmp_path / "peers.json", "-o", tmp_path / "results.md")
    report = (tmp_path / "results.md").read_text()
    assert (
        "\n## EESD against other runtimes: m\n" in report
        and "| llama.cpp Q4_0 | 0.0123 | 75.0% | 4 |" in report
    )


LLAMA_CPP = """
import time
PACKAGE = "pytest"

def load(path, options):
    return Fake()

class Fake:
    filled = 0

    def prefill(self, tokens, start):
        assert start in (0, self.filled)
        self.filled = start + len(tokens)
        return 0.5

    def passes(self, rows, behind, count):
        assert behind == self.filled
        return [9.0] + [float(rows)] * (count - 1)

    def slot_bytes(self):
        return 1000
"""
"""A peer whose passes take a second for each token, and whose first one is slow."""


def test_passes_are_timed_side_by_side_with_their_share_of_the_bandwidth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_files.write(
        tmp_path / "m.gguf", gguf_files.Spec("llama", table="Q8_0", matrices="Q4_0")
    )
    work = tmp_path / "work"
    output = tmp_path / "passes.json"
    only = ("--only", "EESD gguf", "--exit-layer", 1, "--max-seq-len", 64)
    succeed(main, "convert", "--model", file, "-o", work, *only)
    record = Work.load(work)
    record.made |= {"llama.cpp gguf": {}, "ik_llama.cpp gguf": {}}
    record.save(work)
    (tmp_path / "fake.py").write_text(LLAMA_CPP)
    for name in ("llama.cpp", "ik_llama.cpp"):
        monkeypatch.setitem(PEERS, name, replace(PEERS[name], worker=str(tmp_path / "fake.py")))
    kernels = ["scalar", "scalar:int8"] if not operators.missing() else []
    sizes = ("--rows", "3", "--behind", "20 10", "--prompt", 16, "--repeats", 3, "--threads", "1")
    done = succeed(
        main, "passes", "--work", work, "-o", output, *sizes, "--kernels", " ".join(kernels)
    )
    found = Passes.load(output)
    own = [f"EESD gguf, {name}" for name in kernels] or ["EESD gguf"]
    names = [*own, "llama.cpp gguf", "ik_llama.cpp gguf", "ik_llama.cpp gguf, rtr"]
    assert {(p.contestant, p.behind, p.rows) for p in found.passes} == {
        *product(names, (10, 20), (1, 3)),
        *product(names, (0,), (16,)),
        *product(("memory",), (10, 20), (0,)),
    }
    assert all(
        len(p.seconds) == (4 if p.behind else 3) and min(p.seconds) > 0 for p in found.passes
    )
    blocks = 3 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512)
    weights = (blocks + len(gguf_files.VOCABULARY) * 256) // 32 * 18 + 4 * 256 * 7
    assert found.sizes == {"gguf": [weights, blocks]}
    assert {p.bytes - weights for p in found.passes if p.contestant == names[-1]} == {
        0,
        10_000,
        20_000,
    }
    caches = [
        {p.bytes - weights for p in found.passes if p.contestant == name and p.behind == 20}
        for name in own
    ]
    assert all(max(int8) < min(float32) / 3 for float32, int8 in pairwise(caches))
    assert {*found.peaks} == {"1"} and all(most > 1e6 for most in found.peaks["1"].values())
    second = [
        p if p.contestant != "memory" else replace(p, seconds=[p.bytes / 1e6]) for p in found.passes
    ]
    replace(found, passes=second, peaks={"1": {"avx2": blocks * 64.0}}).save(output)
    succeed(draw, output, "-o", tmp_path / "results.md")
    report = (tmp_path / "results.md").read_text()
    [row] = re.findall(r"^\| 10 \| ik_llama.cpp gguf, rtr \|.*", report, re.M)
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert (
        cells[2] == "1000.00"
        and cells[6] == f"{(weights + 10_000) / 1e6:.0%}"
        and cells[-1] == "3.00"
    )
    assert re.search(r"\| llama.cpp gguf \| 500 \| \*\*[\d.]+\*\* \(.*\) \| 50% \|", report)
    assert f"{own[-1]}, 1 threads, 3 after 20: " in done.stdout
    assert_refused(
        run(main, "passes", "--work", work, "--rows", "1 x"), "--rows '1 x'", "positive integers"
    )


def test_batches_are_measured_and_their_tokens_compared(
    engine: Path, work: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "tasks.jsonl"
    output = tmp_path / "batches.json"
    lines = [{"id": str(n), "task": "t", "prompt": "def f(x): return x" * n} for n in (1, 3, 2)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    options = (
        "--task",
        prompts,
        "--concurrency",
        "1 2",
        "--rounds",
        2,
        "--prompts",
        3,
        "--threads",
        1,
    )
    base = ("--work", work, "--output", output, "--group", "F32")
    assert_refused(run(main, "batches", *base), "has no EESD F32", "--eesd")
    found = succeed(main, "batches", *base, "--eesd", engine, *options, "-n", 6, "--shortest", 4)
    results = json.loads(output.read_text())
    assert (
        set(results["results"]) == {"EESD, automatic", "EESD, always", "EESD, never"}
        and not results["skipped"]
    )
    assert (
        results["tokens_equal"] == dict.fromkeys(results["results"], 1.0)
        and "| 3 of 4 to 6 tokens" in found.output
    )
    for by in results["results"].values():
        assert set(by) == {"1", "2"}
        for one in by.values():
            assert len(one["each"]) == 2 and one["tokens_per_second"] > 0
            assert 0 < one["first_token_seconds"]["p50"] <= one["first_token_seconds"]["p99"]
    succeed(draw, output, "-o", tmp_path / "results.md")
    report = (tmp_path / "results.md").read_text()
    row = next(line for line in report.splitlines() if line.startswith("| EESD, never |"))
    assert row in found.output and row.endswith("| 100% |")
    assert_refused(
        run(main, "batches", *base, "--eesd", engine, "--concurrency", "1 x"), "--concurrency '1 x'"
    )


def test_who_batches_takes_part() -> None:
    everybody = [
        *of_variant("EESD", "gguf", "gguf", Path("e")),
        *of_variant("llama.cpp", "gguf", "gguf", Path("l")),
    ]
    everybody += of_variant("ort-genai", "gguf", "gguf", Path("o"))
    assert [*entries(everybody)] == ["EESD, automatic", "EESD, always", "EESD, never", "llama.cpp"]


def test_divergence_is_that_of_the_distributions() -> None:
    p = np.array([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]])
    q = np.array([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]])
    divergence, same = compare(np.log(p).astype(np.float32) + 3, np.log(q).astype(np.float32))
    assert divergence == pytest.approx(0.25 * np.log(2), rel=1e-5) and same == 1
    with pytest.raises(PeerError, match="shape"):
        compare(np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32))
    with pytest.raises(PeerError, match="finite"):
        compare(np.zeros((1, 2), np.float32), np.full((1, 2), np.nan, np.float32))


def test_prompts_do_not_begin_alike() -> None:
    texts = [[1] * 5, [2] * 9, [3] * 2, [4] * 9, [5] * 6]
    prompts = choose_prompts(texts, {"short": (2, 4), "long": (1, 6), "longest": (1, 7)}, Path("p"))
    assert [p.tokens for p in prompts] == [[1] * 4, [2] * 4, [3, 3, 4, 4, 4, 4], [4] * 5 + [5] * 2]
    assert [(p.id, p.kind) for p in prompts] == [
        ("short-1", "short"),
        ("short-2", "short"),
        ("long-1", "long"),
        ("longest-1", "longest"),
    ]


def test_names_are_chosen_by_patterns() -> None:
    assert chosen(["EESD int4", "OpenVINO int4", "EESD int8"], ["*int4"]) == {
        "EESD int4",
        "OpenVINO int4",
    }


def test_workers_need_nothing_of_eesd() -> None:
    """They run in the peers' interpreter; only EESD's own worker imports it, and none at the top
    what may be missing."""
    for path in WORKERS.glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        top = {n for node in tree.body for n in _imported(node)}
        everywhere = {n for node in ast.walk(tree) for n in _imported(node)}
        assert top <= {*sys.stdlib_module_names} | (
            {"numpy"} if path.name == "eesd_peer.py" else set()
        ), path
        assert "eesd" not in everywhere or path.name == "eesd_peer.py"


def _imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def test_who_gives_no_answer_is_ended(fakes: dict[str, Contestant], tmp_path: Path) -> None:
    (tmp_path / "hangs").write_text("2")
    with closing(Process(sys.executable, fakes["hangs"].worker, 1, 600)) as process:
        process.ask("load", path=str(tmp_path), options={"variant": "hangs"})
        process.seconds = 0.1
        with pytest.raises(PeerError, match="generate: no answer within 0 seconds"):
            process.ask("generate", prompt=[2], count=3)


def test_a_process_ends_with_its_block(fakes: dict[str, Contestant]) -> None:
    with closing(Process(sys.executable, fakes["sound"].worker, 1, 30)) as process:
        assert process.ask("hello")["package"] == "pytest"
        assert process.memory()["peak_bytes"] > 1_000_000
    assert process.memory() == {}
