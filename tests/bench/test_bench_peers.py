"""Tests of the comparison with other runtimes. They use real workers of EESD, and fake peers that
fail."""

import ast
import json
import re
import sys
from contextlib import closing
from dataclasses import asdict, replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from support import gguf_files
from support.command import assert_refused, run, succeed

from eesd.runtime.decoding.sampling import Sampling
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
from lab.peers.texts import PROMPT_TOKENS, choose_prompts
from lab.peers.workers.ort_genai_peer import nearest
from lab.results import main as draw

FEW = ("--per-kind", 1, "--lengths", "24", "-n", 9, "--processes", 1, "--threads", 1)
TEXTS = {"code": "the first text is read", "chat": "another text to go on with, long enough"}

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

    def generate(self, prompt, count, temperature):
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
def work(engine: Path, text_model: Path, tmp_path: Path) -> Path:
    """A work directory with both forms of the model for EESD. The interpreter of the peers is the
    interpreter of the tests."""
    directory = tmp_path / "work"
    directory.mkdir()
    made = {"EESD gguf": {"bytes": 1.0}, "EESD F32": {"bytes": 1.0}}
    for name in made:
        (directory / name.replace(" ", "-")).symlink_to(engine)
    Work(str(text_model), sys.executable, made).save(directory)
    lines = [json.dumps({"task": kind, "prompt": text}) + "\n" for kind, text in TEXTS.items()]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    return directory


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Contestant]:
    """Contestants that fail as their name says, on the prompt that a file with this name
    contains."""
    file = tmp_path / "fake.py"
    file.write_text(FAKE)
    monkeypatch.setattr("lab.peers.measure.REST_SECONDS", 0)
    monkeypatch.setitem(PEERS, "fake", Peer(str(file), ()))
    names = ("sound", "broken", "dies", "hangs", "stops", "crowds")
    return {name: Contestant("fake", name, "plain", str(tmp_path)) for name in names}


def comparison(
    contestants: list[Contestant], path: Path, result: Result | None = None
) -> Comparison:
    prompts = [Prompt(f"short-{n}", "short", [n, 50], 3) for n in (1, 2, 3)]
    options = Options(1, 1)
    fresh = Result(asdict(options), {"name": "m"}, contestants, prompts)
    return Comparison(result or fresh, options, {"fake": sys.executable}, 600, path, lambda _: None)


def timed_calls(directory: Path) -> list[str]:
    """Returns the variant and the first token of each measured call. Warm-up calls, whose prompts
    are reversed, are left out."""
    lines = [line.split() for line in (directory / "calls").read_text().splitlines()]
    return [f"{variant} {token}" for variant, token, _ in lines if token != "50"]


def test_eesd_decodes_as_it_does_alone_and_is_reported(
    engine: Path, work: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "results.json"
    text = tmp_path / "held.txt"
    text.write_text("some other words that nobody has seen " * 3)
    options = ("--prompts", tmp_path / "prompts.jsonl", "--quality-text", text, "--window", 32)
    done = succeed(main, "run", "--work", work, "-o", output, *options, *FEW)

    result = Result.load(output)
    assert result.complete and not result.skipped
    names = ["EESD, plain", "EESD, drafting"]
    assert [c.name for c in result.contestants] == names
    kinds = ["code", "code, T=0.7", "chat", "chat, T=0.7", "prompt of 24"]
    assert [p.kind for p in result.prompts] == kinds and len(result.prompts[-1].tokens) == 24
    llm = load(engine, speculation=None, threads=1)
    for prompt in result.prompts:
        sampling = Sampling(temperature=prompt.temperature, seed=1)
        expected = llm.generate(
            prompt.tokens, sampling, max_new_tokens=prompt.count, ignore_eos=True
        ).tokens
        found = {r.contestant: r.tokens for r in result.runs if r.prompt == prompt.id}
        assert found == dict.fromkeys(names, expected)
    assert [load.contestant for load in result.loads] == names
    assert all(load.peak_bytes and load.anonymous_bytes for load in result.loads)
    assert result.quality_reference == "EESD F32, plain"
    [quality] = result.qualities
    assert quality.positions == 96 and abs(quality.divergence) < 1e-6 and quality.agreement == 1

    table = "\n".join(markdown(result))
    assert table in done.stdout and "quality, EESD, plain" in done.stdout
    rows = [line for line in table.splitlines() if line.startswith("| EESD, drafting ")]
    assert rows[-1].endswith("| 9 of 9 |") and len(re.findall(r"\*\*\d+\.\d\d\*\*", rows[1])) == 6


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
    assert measured.result.runs[0] == Run("fake sound, plain", 0, "short-1", 0.5, 1.0, [7, 7, 7])
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
    assert found.skipped == {f"fake {name}, plain": reason} and not found.complete
    assert [
        (r.contestant, r.prompt) for r in found.runs if r.contestant == "fake sound, plain"
    ] == [("fake sound, plain", f"short-{n}") for n in (1, 2, 3)]
    assert [r.prompt for r in found.runs if r.contestant == f"fake {name}, plain"] == ["short-1"]
    assert f"* fake {name}, plain: {reason}" in markdown(found)


def test_who_computes_with_other_threads_is_refused(
    fakes: dict[str, Contestant], tmp_path: Path
) -> None:
    (tmp_path / "crowds").write_text("2")
    measured = comparison([fakes["sound"], fakes["crowds"]], tmp_path / "r.json")
    measured.run([])
    assert measured.result.skipped == {"fake crowds, plain": "computed with 3 threads instead of 1"}
    assert (
        {run.contestant for run in measured.result.runs}
        == {load.contestant for load in measured.result.loads}
        == {"fake sound, plain"}
    )


def test_threads_that_hardly_compute_are_not_counted() -> None:
    assert busy_threads({"1": 5.0, "2": 1.0}, {"1": 7.0, "2": 2.5, "3": 0.4}) == 2
    assert busy_threads({}, {}) == 0


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
def test_forms_are_made_once_and_peers_that_are_not_installed_are_skipped(tmp_path: Path) -> None:
    file = gguf_files.write(
        tmp_path / "m.gguf", gguf_files.Spec("llama", table="Q8_0", matrices="Q4_0")
    )
    work = tmp_path / "work"
    options = ("--model", file, "-o", work, "--max-seq-len", 64)
    done = succeed(main, "convert", *options, "--only", "ort-genai*", "--only", "EESD*")
    record = Work.load(work)
    assert sorted(record.made) == ["EESD F32", "EESD gguf"]
    lines = done.stdout.splitlines()
    assert lines[1].startswith("ort-genai gguf: skipped; convert: ")
    again = succeed(main, "convert", *options, "--only", "EESD F32")
    assert again.stdout == "EESD F32: there already\n"
    missing = ("--only", "ik_llama.cpp*", "--peer-python", tmp_path / "none")
    assert "cannot be started (No such file" in succeed(main, "convert", *options, *missing).stdout

    (tmp_path / "held.txt").write_text("".join(gguf_files.CHARACTERS[:40]))
    texts = [json.dumps({"prompt": letter * 40}) for letter in gguf_files.CHARACTERS[:5]]
    (tmp_path / "prompts.jsonl").write_text("\n".join(texts))
    output = tmp_path / "r.json"
    given = ("--prompts", tmp_path / "prompts.jsonl", "--quality-text", tmp_path / "held.txt")
    succeed(main, "run", "--work", work, "-o", output, *given, "--window", 20, *FEW)
    [quality] = Result.load(output).qualities
    assert quality.positions == 40 and 0 < quality.divergence < 0.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--only", "rwkv*"), ("--only 'rwkv*'", "EESD, plain")),
        (("--kind", "poems"), ("'poems'",)),
        (("--lengths", "5000"), ("one of 5000 is wanted",)),
        (("--prompts", "missing.jsonl"), ("missing.jsonl",)),
        (("--quality-text", "missing.txt"), ("missing.txt",)),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    options: tuple[object, ...], words: tuple[str, ...], work: Path, tmp_path: Path
) -> None:
    base = ("--work", work, "-o", tmp_path / "r.json", "--prompts", tmp_path / "prompts.jsonl")
    assert_refused(run(main, "run", *base, *FEW, *options), *words)
    assert not (tmp_path / "r.json").exists()


def test_results_are_neither_overwritten_nor_mixed_nor_misread(
    work: Path, engine: Path, tmp_path: Path
) -> None:
    assert_refused(
        run(main, "run", "--work", tmp_path / "empty"), "work.json is missing", "convert"
    )
    result = tmp_path / "r.json"
    base = ("--work", work, "-o", result, "--prompts", tmp_path / "prompts.jsonl", *FEW)
    comparison([], result).run([])
    before = result.read_bytes()
    assert_refused(run(main, "run", *base), "--resume", "--overwrite")
    assert_refused(run(main, "run", *base, "--resume"), "the model changed", "--overwrite")
    assert result.read_bytes() == before
    result.write_text(before.decode().replace('"schema": 2', '"schema": 9'))
    assert_refused(run(main, "run", *base, "--resume"), "schema 9")
    result.write_text(before.decode().replace('"prompts": [', '"prompt": ['))
    assert_refused(run(main, "run", *base, "--resume"), "damaged")
    result.write_text("{}")
    assert_refused(run(main, "run", *base, "--resume"), "not a comparison")
    assert_refused(
        run(main, "convert", "--model", engine.parent / "none", "-o", work),
        "none is not a file",
        "GGUF",
    )


def test_ratios_are_paired_and_medians_are_shown(tmp_path: Path) -> None:
    eesd = of_variant("EESD", "gguf", Path("e"))[0]
    peer = of_variant("llama.cpp", "gguf", Path("l"))[0]
    prompts = [Prompt(f"code-{n}", "code", [1, n], 11) for n in (1, 2)]
    prompts.append(Prompt("prompt-2", "prompt of 2", [1, 2], PROMPT_TOKENS))
    result = Result(asdict(Options(1, 2)), {"name": "m"}, [eesd, peer], prompts, complete=True)
    # EESD takes half the time of the peer for one prompt, and a quarter for the other prompt.
    for prompt, seconds, factor in (("code-1", 1.0, 2), ("code-2", 0.1, 4), ("prompt-2", 1.0, 1)):
        result.runs.append(Run(eesd.name, 0, prompt, 0.1, seconds, [5] * 11))
        result.runs.append(Run(peer.name, 0, prompt, 0.4, seconds * factor, [5] * 11))
    for one in (eesd, peer):
        result.loads.append(Load(one.name, 0, 1.25, 3_000_000, 2_000_000))
    result.sizes["llama.cpp gguf"] = 4_000_000
    result.qualities.append(Quality(peer.name, 64, 0.0123, 0.75))
    result.save(tmp_path / "peers.json")
    succeed(draw, tmp_path / "peers.json", "-o", tmp_path / "results.md")
    report = (tmp_path / "results.md").read_text()
    assert "\n## EESD against other runtimes: m\n" in report and "**Incomplete**" not in report
    assert "| EESD, plain | 55.0 (10.0 to 100.0) | 20.0 (20.0 to 20.0) |" in report
    assert (
        "| EESD, plain / llama.cpp, plain | **3.00** (2.00 to 4.00) | **4.00** (4.00 to 4.00) |"
        in report
    )
    assert "| llama.cpp, plain | 1.25 | 3 | 2 | 4 |  |" in report
    assert "| llama.cpp, plain | 0.01230 | 75.0% |" in report


def test_first_differences_are_shown_with_both_margins(work: Path, tmp_path: Path) -> None:
    """EESD equals itself. Compared with a peer that always gives token 7, the margins are
    logits."""
    record = Work.load(work)
    (tmp_path / "same.py").write_text((WORKERS / PEERS["EESD"].worker).read_text("utf-8"))
    record.made["llama.cpp gguf"] = {}
    record.save(work)
    (work / "llama.cpp-gguf").symlink_to((work / "EESD-gguf").resolve())
    options = ("--work", work, "-o", tmp_path / "t.json", "--prompts", tmp_path / "prompts.jsonl")
    for worker, said in ((tmp_path / "same.py", "2 of 2"), (tmp_path / "seven.py", "0 of 2")):
        (tmp_path / "seven.py").write_text(SEVEN)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(PEERS, "llama.cpp", replace(PEERS["llama.cpp"], worker=str(worker)))
            done = succeed(main, "tokens", *options, "-n", 9, "--threads", 1)
        assert f"{said} greedy texts of 9 tokens equal" in done.stdout
    assert re.search(r"^\| code-1 \| \d \| -?\d+\.\d+ \| 1\.000 \|$", done.stdout, re.M)


SEVEN = """
import numpy as np
PACKAGE = "pytest"

def load(path, options):
    return Seven()

class Seven:
    def generate(self, prompt, count, temperature):
        return [7] * count, [0.5] * count

    def logits(self, tokens):
        return np.eye(512, dtype=np.float32)[[7] * len(tokens)]
"""
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
"""A peer whose passes take a second for each token, and whose first pass is slow."""


def test_passes_are_timed_side_by_side_with_their_share_of_the_bandwidth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_files.write(
        tmp_path / "m.gguf", gguf_files.Spec("llama", table="Q8_0", matrices="Q4_0")
    )
    work = tmp_path / "work"
    output = tmp_path / "passes.json"
    only = ("--only", "EESD gguf", "--max-seq-len", 64)
    succeed(main, "convert", "--model", file, "-o", work, *only)
    record = Work.load(work)
    record.made["llama.cpp gguf"] = {}
    record.save(work)
    (tmp_path / "fake.py").write_text(LLAMA_CPP)
    fake = replace(PEERS["llama.cpp"], worker=str(tmp_path / "fake.py"))
    monkeypatch.setitem(PEERS, "llama.cpp", fake)
    kernels = ["scalar", "scalar:int8"] if not operators.missing() else []
    sizes = ("--rows", "3", "--behind", "20 10", "--prompt", 16, "--repeats", 3, "--threads", "1")
    done = succeed(
        main, "passes", "--work", work, "-o", output, *sizes, "--kernels", " ".join(kernels)
    )
    found = Passes.load(output)
    own = [f"EESD, {name}" for name in kernels] or ["EESD, plain"]
    names = [*own, "llama.cpp, plain"]
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
    assert (found.weights, found.products) == (weights, blocks)
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
    [row] = re.findall(r"^\| 10 \| llama.cpp, plain \|.*", report, re.M)
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert (
        cells[2] == "1000.00"
        and cells[6] == f"{(weights + 10_000) / 1e6:.0%}"
        and cells[-1] == "3.00"
    )
    assert re.search(r"\| llama.cpp, plain \| 500 \| \*\*[\d.]+\*\* \(.*\) \| 50% \|", report)
    assert f"{own[-1]}, 1 threads, 3 after 20: " in done.stdout
    assert_refused(
        run(main, "passes", "--work", work, "--rows", "1 x"), "--rows '1 x'", "positive integers"
    )


def test_batches_are_measured_and_their_tokens_compared(work: Path, tmp_path: Path) -> None:
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
    base = ("--work", work, "--output", output)
    found = succeed(main, "batches", *base, *options, "-n", 6, "--shortest", 4)
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
    assert_refused(run(main, "batches", *base, "--concurrency", "1 x"), "--concurrency '1 x'")


def test_who_batches_takes_part() -> None:
    everybody = [
        *of_variant("EESD", "gguf", Path("e")),
        *of_variant("llama.cpp", "gguf", Path("l")),
    ]
    everybody += of_variant("ort-genai", "gguf", Path("o"))
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
    texts = [("a", [1] * 5), ("b", [2] * 9), ("a", [3] * 2)]
    prompts = choose_prompts(texts, 1, (0.0, 1.0), 9, (3, 7))
    assert [(p.id, p.tokens, p.temperature) for p in prompts] == [
        ("a-1", [1] * 5, 0),
        ("a, T=1-1", [1] * 5, 1),
        ("b-1", [2] * 9, 0),
        ("b, T=1-1", [2] * 9, 1),
        ("prompt-3", [3, 3, 2], 0),
        ("prompt-7", [2] * 7, 0),
    ]


def test_names_are_chosen_by_patterns() -> None:
    assert chosen(["EESD int4", "OpenVINO int4", "EESD int8"], ["*int4"]) == {
        "EESD int4",
        "OpenVINO int4",
    }


def test_workers_need_nothing_of_eesd() -> None:
    """Workers run in the peers' interpreter. Only EESD's worker imports eesd, and no worker imports
    optional packages at the top."""
    own = {path.stem for path in WORKERS.glob("*.py")}
    for path in WORKERS.glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        top = {n for node in tree.body for n in _imported(node)}
        everywhere = {n for node in ast.walk(tree) for n in _imported(node)}
        assert top <= {*sys.stdlib_module_names, "numpy", *own}, path
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
            process.ask("generate", prompt=[2], count=3, temperature=0.0)


def test_a_process_ends_with_its_block(fakes: dict[str, Contestant]) -> None:
    with closing(Process(sys.executable, fakes["sound"].worker, 1, 30)) as process:
        assert process.ask("hello")["package"] == "pytest"
        assert process.memory()["peak_bytes"] > 1_000_000
    assert process.memory() == {}
