"""Tests of a model whose weights are split over ranks. The ranks are processes, or threads of one
process. If each rank is a process, the commands give the tokens of a single process. All ranks end
together."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial, reduce
from hashlib import sha256
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from support import team_member, tiny_models
from support.command import assert_refused, export_engine, run, slow_but, succeed
from support.eagle_heads import deep_head
from support.family_grid import SMALL, FamilyCase
from support.harness import without_budget
from support.serving import eventually
from support.started_ranks import codes, started

import eesd
from eesd.common.errors import EESDError
from eesd.common.manifest import load_manifest
from eesd.export.inspect import main as inspect_main
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.cli import main as run_main
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.team import Split
from eesd.runtime.engines.torch_engine import open_torch
from eesd.runtime.engines.torch_weights import load_modules
from eesd.runtime.llm import LLM, Speculation
from eesd.serve.cli import main as serve_main

MEMBER = Path(team_member.__file__)
PROMPT = [1, 17, 5, 40, 3, 22, 9, 31, 7, 2, 11, 13]
"""A prompt that is longer than the windows."""
WHOLE = ("--exit-head", "quantized")
"""The draft is all layers in 4 bits."""
SIZES = SMALL | {"intermediate_size": 48, "pad_token_id": None}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}
WINDOWS = {"sliding_window": 9, "query_pre_attn_scalar": 8}
CASES = [
    FamilyCase("qwen3_moe", SIZES | EXPERTS, 2),
    FamilyCase("gemma2", SIZES | WINDOWS | {"attn_logit_softcapping": 2.0}, 2),
    FamilyCase("gemma3_text", SIZES | WINDOWS, 3),
    FamilyCase("hunyuan_v1_dense", SIZES, 1),
]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns a function that takes export options and gives an engine directory. The model has
    four KV heads, one for each of four ranks, and its head has deep layers."""
    root = tmp_path_factory.mktemp("parallel")
    model = tiny_models.build(root / "model", 97, layers=3, damping=0.3, seed=0, kv_heads=4)
    deep_head(Checkpoint(model), root / "head")

    @cache
    def made(*options: str) -> Path:
        output = root / "-".join(("plans", *options))
        return export_engine(
            model, output, "--exit-head", root / "head", "--max-seq-len", 128, *options
        )

    return made


@pytest.fixture(scope="module")
def directory(export: Callable[..., Path]) -> Path:
    return export("--quantize-draft", "none")


def in_one_process(
    plans: Path, ranks: int, speculation: Speculation | None = None, prompt: Sequence[int] = PROMPT
) -> tuple[Any, list[int]]:
    """Returns the logits of a prompt and the generated tokens. The ranks are threads of this
    process. If there is only one rank, the model is not split."""
    manifest = load_manifest(plans)
    parts = dict[int, torch.Tensor]()
    meeting = Barrier(ranks)

    def add(rank: int, part: torch.Tensor) -> torch.Tensor:
        parts[rank] = part
        meeting.wait(60)
        total = reduce(torch.add, (parts[rank] for rank in range(ranks)))
        meeting.wait(60)
        return total

    def decode(rank: int) -> tuple[Any, list[int]]:
        split = Split(ranks, rank, partial(add, rank)) if ranks > 1 else None
        engines = Engines(*open_torch(plans, manifest, 1, True, "cpu", split=split))
        llm = LLM(plans, manifest, engines, speculation)
        without_budget(llm)
        with llm.session(prompt, max_new_tokens=1) as session:
            logits = session.peek().copy()
        return logits, llm.generate(prompt, max_new_tokens=16, ignore_eos=True).tokens

    with ThreadPoolExecutor(ranks) as pool:
        found = [*pool.map(decode, range(ranks))]
    for logits, tokens in found:
        assert (logits == found[0][0]).all() and tokens == found[0][1], (
            "all ranks have the same sums"
        )
    return found[0]


def whole(directory: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns the results of a process that has all weights."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    team_member.main(directory, output)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def in_processes(directory: Path, output: Path, ranks: int) -> dict[str, Any]:
    launch = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        ranks,
    )
    done = subprocess.run(
        [*map(str, (*launch, MEMBER, directory, output))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize(
    ("ranks", "options"),
    slow_but(
        [(2, ("--quantize-draft", "none")), (4, ("--quantize", "int4")), (2, WHOLE)], (2, WHOLE)
    ),
)
def test_ranks_have_the_tokens_of_one_process(
    export: Callable[..., Path],
    tmp_path: Path,
    ranks: int,
    options: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokens are equal with chains, trees, sampling, kept prompts and quantized weights. The
    logits equal, bit for bit, the logits of ranks that are threads."""
    directory = export(*options)
    found = in_processes(directory, tmp_path / "several.json", ranks)
    assert found["drafting differs"] == 0 and found["chain, tokens a round"] > 1
    expected = whole(directory, tmp_path / "whole.json", monkeypatch)
    assert {name: found[name] for name in team_member.WAYS} == {
        name: expected[name] for name in team_member.WAYS
    }
    logits, _ = in_one_process(directory, ranks, prompt=team_member.PROMPTS[1])
    assert found["logits"] == sha256(logits.tobytes()).hexdigest()


FAMILIES = [*CASES, "qwen2", "qwen3-bias", "llama-bias"]


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: getattr(case, "model_type", case))
def test_parts_add_up_to_the_whole(family_dir: Any, tmp_path: Path, case: FamilyCase | str) -> None:
    """Logits of a prompt, and tokens decoded with draft trees, equal those of one process.

    Some families have biases, which only one rank may add, and some have norms of each head, which
    every rank needs. Other families have experts, windows, caps, norms after a block's parts, or
    norms after the rotation.
    """
    options = (
        "--exit-layer",
        1,
        "--dtype",
        "float32",
        "--quantize-draft",
        "none",
        "--max-seq-len",
        64,
        "--max-tree-nodes",
        8,
    )
    model = family_dir(case) if isinstance(case, str) else case.write(tmp_path / "model")
    plans = export_engine(model, tmp_path / "plans", *options)
    speculation = Speculation("fixed:k=3", 2, guard=False, drafter="exit")
    (expected, tokens), (logits, split_tokens) = (
        in_one_process(plans, ranks, speculation) for ranks in (1, 2)
    )
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert expected.std() > 0.01 and split_tokens == tokens


def test_models_that_no_rank_can_have_a_part_of_are_refused(tmp_path: Path) -> None:
    norms = FamilyCase("olmo2", SIZES, 0).write(tmp_path / "model")
    plans = export_engine(
        norms, tmp_path / "plans", "--exit-layer", 1, "--dtype", "float32", "--max-seq-len", 64
    )
    assert_refused(
        run(inspect_main, plans, "--memory", "--parallel", 2),
        "norms over all heads",
        "start one process",
    )
    manifest = load_manifest(
        export_engine(
            CASES[0].write(tmp_path / "experts"), plans, "--exit-layer", 1, "--max-seq-len", 64
        )
    )
    experts = manifest.geometry.experts
    assert experts is not None
    with pytest.raises(
        EESDError, match="2 ranks do not divide the model's 33 columns of an expert"
    ):
        replace(manifest.geometry, experts=replace(experts, size=33)).on_rank(2)


@pytest.mark.parametrize("options", [("--quantize-draft", "none"), WHOLE])
def test_a_rank_has_the_bytes_that_inspect_says(
    export: Callable[..., Path], options: tuple[str, ...]
) -> None:
    """The draft graph and the verify graph share the parts of weights, just as they share whole
    weights. Quantized weights are dequantized."""
    directory = export(*options)
    manifest = load_manifest(directory)
    [estimated] = json.loads(
        succeed(inspect_main, directory, "--memory", "--parallel", 2, "--json").stdout
    )["devices"]
    [stage] = load_modules(
        directory, manifest, [torch.device("cpu")], True, Split(2, 1, torch.clone)
    )
    assert stage.draft is not None
    tensors = [*stage.rotary_tables, *stage.verify.parameters(), *stage.draft.parameters()]
    found = {(one.data_ptr(), one.shape): one.nbytes for one in tensors if not one.is_meta}
    weights = estimated["draft_weights"] + estimated["verify_weights"] - estimated["shared_weights"]
    assert sum(found.values()) == weights
    whole = json.loads(succeed(inspect_main, directory, "--memory", "--json").stdout)["devices"][0]
    assert estimated["kv_cache"] * 2 == whole["kv_cache"] and estimated["total"] < whole["total"]


def test_ranks_that_do_not_divide_the_model_are_refused(directory: Path) -> None:
    manifest = load_manifest(directory)
    words = "3 ranks do not divide the model's 4 key-value heads"
    with pytest.raises(EESDError, match=words):
        open_torch(directory, manifest, 1, True, "cpu", split=Split(3, 0, torch.clone))
    for options in (("--memory",), ("--predict", "h100")):
        assert_refused(run(inspect_main, directory, *options, "--parallel", 3), words)
    assert_refused(run(inspect_main, directory, "--parallel", 2), "add --memory or --predict")


def test_a_rank_that_ends_is_one_sentence(directory: Path, tmp_path: Path) -> None:
    """Rank 1 ends after loading. Rank 0 is a script, which reports this and does not wait."""
    (tmp_path / "run.py").write_text(f"""
import os
import eesd
from eesd.runtime.engines import torch_engine
if os.environ["RANK"] == "1":
    torch_engine.follow = lambda *_: os._exit(0)
eesd.load({str(directory)!r}, "torch").generate([5, 9, 3], max_new_tokens=8)
""")
    with started(tmp_path, tmp_path / "run.py") as ranks:
        assert codes(ranks) == [1, 0]
    assert (
        tmp_path / "0.err"
    ).read_text() == "error: Rank 1 has ended; see its output, and start all ranks again.\n"


def test_a_script_loads_one_model(directory: Path, tmp_path: Path) -> None:
    """Only rank 0 continues after ``load``. A second ``load`` is refused."""
    (tmp_path / "run.py").write_text(f"""
import eesd
llm = eesd.load({str(directory)!r}, "torch")
print(llm.generate([5, 9, 3], max_new_tokens=8, ignore_eos=True).tokens)
try:
    eesd.load({str(directory)!r}, "torch")
except eesd.EESDError as error:
    print(error)
""")
    with started(tmp_path, tmp_path / "run.py") as ranks:
        assert codes(ranks) == [0, 0]
    tokens = eesd.load(directory).generate([5, 9, 3], max_new_tokens=8, ignore_eos=True).tokens
    refused = "These processes already share a model; start other processes for another model."
    assert (tmp_path / "0.out").read_text() == f"{tokens}\n{refused}\n"
    assert (tmp_path / "1.out").read_text() == (tmp_path / "1.err").read_text() == ""


TEXT = "for i in range"
COUNT = 20
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--no-python",
)
LOST = "error: Rank {} has ended; see its output, and start all ranks again.\n"


@pytest.mark.slow
def test_torchrun_prints_the_text_of_one_process(engine: Path) -> None:
    """The text is printed once. Rank 0 reads standard input."""
    options = ("--engine-dir", engine, "-n", COUNT, "--json")
    command = [
        *TORCHRUN,
        sys.executable,
        "-m",
        "eesd.runtime.cli",
        *map(str, options),
        "--backend",
        "torch",
    ]
    done = subprocess.run(command, input=TEXT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    [line] = done.stdout.splitlines()
    assert (
        json.loads(line)["tokens"]
        == json.loads(succeed(run_main, *options, "-p", TEXT).stdout)["tokens"]
    )


@contextmanager
def serving(engine: Path, folder: Path) -> Iterator[tuple[list["subprocess.Popen[bytes]"], str]]:
    """Yields the two ranks of a server, and the server's URL."""
    options = ("--engine-dir", engine, "--port", 0, "--backend", "torch", "--drain-seconds", 300)
    with started(folder, "-m", "eesd.serve.cli", *options) as ranks:
        log = folder / "0.err"
        eventually(lambda: "on http" in log.read_text() or ranks[0].poll() is not None, 120)
        found = re.search(r"on (http://[\d.:]+)", log.read_text())
        assert found, log.read_text()
        yield ranks, found[1]


@pytest.mark.parametrize("number", slow_but([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_a_server_ends_with_its_ranks(engine: Path, tmp_path: Path, number: signal.Signals) -> None:
    """All ranks get the signal, as from torchrun or a terminal. The running request finishes with
    the tokens of one process."""
    body = {
        "prompt": TEXT,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with serving(engine, tmp_path) as (ranks, url), httpx2.Client(timeout=60) as client:
        with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            chunks = [next(lines)]
            for rank in ranks:
                rank.send_signal(number)
            chunks += lines
        assert codes(ranks) == [0, 0]
    values = [json.loads(line[6:]) for line in chunks if line.startswith("data: {")]
    text = "".join(value["choices"][0]["text"] for value in values)
    assert text == eesd.load(engine).generate(TEXT, max_new_tokens=16, ignore_eos=True).text
    assert [(tmp_path / name).read_text() for name in ("0.out", "1.out", "1.err")] == [""] * 3
    assert "Traceback" not in (tmp_path / "0.err").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_server_that_loses_a_rank_ends_with_one_sentence(
    engine: Path, tmp_path: Path, lost: int
) -> None:
    """The server also ends while no request runs."""
    with serving(engine, tmp_path) as (ranks, _):
        before = (tmp_path / f"{1 - lost}.err").read_text()
        ranks[lost].kill()
        assert ranks[1 - lost].wait(60) == 1
    assert (tmp_path / f"{1 - lost}.err").read_text() == before + LOST.format(lost)


@pytest.mark.slow
def test_interrupted_in_the_middle_all_ranks_end(engine: Path, tmp_path: Path) -> None:
    options = (
        "--engine-dir",
        engine,
        "-n",
        10**6,
        "--ignore-eos",
        "--backend",
        "torch",
        *["-p", TEXT] * 1000,
    )
    with started(tmp_path, "-m", "eesd.runtime.cli", *options) as ranks:
        eventually(lambda: (tmp_path / "0.out").stat().st_size > 0, 120)
        for rank in ranks:
            rank.send_signal(signal.SIGINT)
        assert codes(ranks) == [130, 0]
    assert (tmp_path / "1.out").read_text() == (tmp_path / "1.err").read_text() == ""
    assert "Traceback" not in (tmp_path / "0.err").read_text()


@pytest.mark.parametrize("backend", ["auto", "ort", "tensorrt"])
def test_other_backends_are_refused(
    engine: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """With these backends, every rank would do the same work."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ("WORLD_SIZE is 2", f"{backend} was chosen", "choose the backend torch")
    assert_refused(run(run_main, "--engine-dir", engine, "-p", TEXT, "--backend", backend), *words)
    assert_refused(
        run(serve_main, "--engine-dir", engine, "--port", 0, "--backend", backend), *words
    )


def test_what_cannot_be_split_is_refused(
    engine: Path, text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is refused before the ranks wait for each other."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    options = ("-p", TEXT, "--backend", "torch", "--engine-dir")
    assert_refused(
        run(run_main, *options, engine), "3 ranks do not divide the model's 2 key-value heads"
    )
    staged = export_engine(text_model, tmp_path / "staged", "--stages", 2)
    assert_refused(run(run_main, *options, staged), "without --stages")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert_refused(run(run_main, *options, engine), "RANK", "start them with torchrun")
