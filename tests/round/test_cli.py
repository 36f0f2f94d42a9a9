"""Tests of ``eesd-run`` and ``eesd-doctor``. The text of ``eesd-run`` equals the text of the Python
API."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.command import run, succeed

import eesd
from eesd.common import machine
from eesd.runtime import doctor, llm
from eesd.runtime.cli import main
from eesd.runtime.engines import cpu_engine, operators, ort_engine
from eesd.runtime.llm import LLM, Completion, Piece, Speculation

PROMPT = "for i in range"
COUNT = 20
SAMPLED = ("--temperature", 0.8, "--top-p", 0.9, "--seed", 5)
COMMAND = [sys.executable, "-m", "eesd.runtime.cli"]
ENGINE: tuple[Any, str] = (
    (ort_engine, "OrtEngine") if operators.missing() else (cpu_engine, "CpuEngine")
)
"""The class of engines on the CPU."""


@pytest.fixture(scope="module")
def api(engine: Path) -> LLM:
    return eesd.load(engine, threads=1)


def text_of(engine: Path, *options: object, stdin: str = "") -> str:
    """Returns the output of eesd-run without the final line end."""
    result = succeed(main, "--engine-dir", engine, "-n", COUNT, "--no-stats", *options, stdin=stdin)
    assert result.stderr == "" and result.stdout.endswith("\n")
    return result.stdout[:-1]


def objects(engine: Path, *options: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text_of(engine, "--json", *options).splitlines()]


def expected(api: LLM, prompt: llm.Prompt = PROMPT, **options: Any) -> Completion:
    return api.generate(prompt, max_new_tokens=COUNT, **options)


def test_prompts_are_continued(engine: Path, api: LLM) -> None:
    assert text_of(engine, "-p", PROMPT) == expected(api).text
    assert (
        text_of(engine, "-p", PROMPT, "-p", "x")
        == expected(api).text + "\n" + expected(api, "x").text
    )


def test_a_prompt_is_read_from_stdin_or_a_file(engine: Path, api: LLM, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    for options in ((), ("-p", "-"), ("--prompt-file", tmp_path / "prompt.txt")):
        assert text_of(engine, *options, stdin=PROMPT) == expected(api).text


def test_prompts_are_read_from_json_lines(engine: Path, api: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompts: list[Any] = [PROMPT, [5, 6, 7], messages]
    lines = [
        json.dumps(PROMPT),
        "",
        json.dumps({"prompt": [5, 6, 7]}),
        json.dumps({"messages": messages}),
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    found = objects(engine, "--prompt-file", tmp_path / "prompts.jsonl")
    assert [result["prompt"] for result in found] == prompts
    assert [result["tokens"] for result in found] == [
        expected(api, prompt).tokens for prompt in prompts
    ]


def test_json_output_has_tokens_and_statistics(engine: Path, api: LLM) -> None:
    [found] = objects(engine, "-p", PROMPT, "--controller", "fixed:k=3", "--tree", 2)
    completion = expected(api)
    assert found.keys() == {"prompt", "text", "tokens", "finish_reason", "stats"}
    assert (found["text"], found["tokens"]) == (completion.text, completion.tokens)
    assert found["finish_reason"] == completion.finish_reason
    assert found["stats"].keys() == completion.stats.to_dict().keys()
    assert (
        found["stats"]["new_tokens"] == len(completion.tokens)
        and found["stats"]["draft_tokens"] > 0
    )


def test_sampling_options_reach_the_engine(engine: Path, api: LLM) -> None:
    sampling = eesd.Sampling(0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=5)
    options = ("--top-k", 20, "--min-p", 0.01, "--repetition-penalty", 1.2)
    [found] = objects(engine, "-p", PROMPT, *SAMPLED, *options)
    assert found["tokens"] == expected(api, sampling=sampling).tokens
    assert (
        found["tokens"]
        != objects(engine, "-p", PROMPT, *SAMPLED, *options, "--seed", 6)[0]["tokens"]
    )
    first, second = objects(engine, "-p", PROMPT, "-p", PROMPT, *SAMPLED, *options)
    assert first["tokens"] == found["tokens"], "the first prompt has the seed itself"
    assert second["tokens"] == expected(api, sampling=sampling.of_text(1)).tokens != first["tokens"]
    [rejection] = objects(engine, "-p", PROMPT, *SAMPLED, "--sampling", "rejection", "--ignore-eos")
    assert len(rejection["tokens"]) == COUNT


def test_stop_strings_and_eos_end_the_text(engine: Path, api: LLM) -> None:
    text = expected(api, ignore_eos=True).text
    assert text_of(engine, "-p", PROMPT, "--ignore-eos") == text
    assert (
        text_of(engine, "-p", PROMPT, "--ignore-eos", "--stop", text[7:10])
        == text[: text.index(text[7:10])]
    )


def test_statistics_go_to_stderr(engine: Path, api: LLM) -> None:
    result = succeed(main, "--engine-dir", engine, "-p", PROMPT, "-n", COUNT)
    assert result.stdout == expected(api).text + "\n"
    for word in ("prompt", "14 tokens", "generated", "tokens/s", "acceptance", "untrained"):
        assert word in result.stderr


def test_no_draft_does_not_load_the_draft_engine(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is the same, and the draft engine is not loaded."""
    loaded: list[str] = []
    original = getattr(*ENGINE)

    def load(directory: Path, manifest: Any, stages: Any, *rest: Any, **options: Any) -> Any:
        loaded.extend(stage.file for stage in stages)
        return original(directory, manifest, stages, *rest, **options)

    drafting = text_of(engine, "-p", PROMPT, *SAMPLED)
    monkeypatch.setattr(*ENGINE, load)
    assert text_of(engine, "-p", PROMPT, *SAMPLED, "--no-draft") == drafting
    assert loaded == ["verify.onnx"]
    assert text_of(engine, "-p", PROMPT, *SAMPLED, "--drafter", "text") == drafting
    assert loaded == ["verify.onnx"] * 2
    [found] = objects(engine, "-p", PROMPT, "--no-draft")
    assert found["stats"]["drafting_rounds"] == 0


@pytest.mark.parametrize(
    "options", [(), SAMPLED, ("--tree", 3, "--no-guard")], ids=["greedy", "sampled", "tree"]
)
def test_compare_reports_equal_tokens(engine: Path, options: tuple[object, ...]) -> None:
    result = succeed(
        main,
        "--engine-dir",
        engine,
        "-p",
        PROMPT,
        "-n",
        COUNT,
        "--ignore-eos",
        "--compare",
        *options,
    )
    assert result.stdout == PROMPT + text_of(engine, "-p", PROMPT, "--ignore-eos", *options) + "\n"
    assert f"tokens are equal ({COUNT})" in result.stderr and "speed-up" in result.stderr
    [found] = objects(engine, "-p", PROMPT, "--ignore-eos", "--compare", "--no-guard", *options)
    assert found["equal"] is True and found["divergence"] is None and found["speedup"] > 0
    assert found["plain"]["draft_tokens"] == 0 < found["drafting"]["draft_tokens"]


def test_compare_stops_where_told_and_sums_up_several_prompts(engine: Path) -> None:
    """The table has a row for each prompt and a row for all prompts. Each text is printed below its
    prompt. A stop string ends both texts."""
    options = ("-p", PROMPT, "-p", PROMPT[::-1], "--ignore-eos")
    text = text_of(engine, "-p", PROMPT, "--ignore-eos")
    stopped = succeed(
        main,
        "--engine-dir",
        engine,
        "-n",
        COUNT,
        "--compare",
        *options[:2],
        "--ignore-eos",
        "--stop",
        text[9:11],
    )
    assert stopped.stdout == PROMPT + text[: text.index(text[9:11])] + "\n"
    result = succeed(main, "--engine-dir", engine, "-n", COUNT, "--compare", *options)
    texts = [PROMPT + text, PROMPT[::-1] + text_of(engine, "-p", PROMPT[::-1], "--ignore-eos")]
    assert result.stdout == f"[1] {PROMPT}\n{texts[0]}\n\n[2] {PROMPT[::-1]}\n{texts[1]}\n"
    assert all(f" {name} " in result.stderr for name in ("[1]", "[2]", "all"))
    assert (
        f"tokens are equal ({2 * COUNT})" in result.stderr
        and f"bit for bit ({2 * COUNT} positions)" in result.stderr
    )


def test_compare_shows_acceptance_by_depth(engine: Path) -> None:
    draft = ("--drafter", "exit", "--controller", "fixed:k=2", "--no-guard", "--ignore-eos")
    options = ("-p", PROMPT, "-p", PROMPT[::-1], "--compare", *draft)
    runs = [found["drafting"] for found in objects(engine, *options)]
    shares = []
    for depth in range(2):
        accepted = sum(run["accepted_at_depth"][depth] for run in runs)
        shares.append(f"{accepted / sum(run['verified_at_depth'][depth] for run in runs):.2f}")
    shown = succeed(main, "--engine-dir", engine, "-n", COUNT, *options).stderr
    assert f"acceptance by depth: {' '.join(shares)}\n" in shown


def test_compare_finds_a_difference(
    engine: Path, api: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = expected(api, ignore_eos=True).tokens
    other = [*tokens[:4], (tokens[4] + 1) % 97, *tokens[5:]]
    original = LLM.generate

    def generate(self: LLM, *arguments: Any, draft: bool = True, **options: Any) -> Completion:
        completion = original(self, *arguments, draft=draft, **options)
        return replace(completion, tokens=other) if draft else completion

    monkeypatch.setattr(LLM, "generate", generate)
    [found] = objects(engine, "-p", PROMPT, "--ignore-eos", "--compare")
    divergence = found["divergence"]
    assert (divergence["index"], divergence["plain_token"], divergence["drafting_token"]) == (
        4,
        tokens[4],
        other[4],
    )
    assert found["equal"] is False and divergence["logit_gap"] > 0
    result = succeed(
        main, "--engine-dir", engine, "-p", PROMPT, "-n", COUNT, "--ignore-eos", "--compare"
    )
    assert (
        f"tokens differ from new token 4 on ({tokens[4]} without drafting, {other[4]} with)"
        in result.stderr
    )


def test_show_drafts_colours_draft_tokens(engine: Path, api: LLM) -> None:
    """Colours appear only on a terminal."""
    assert text_of(engine, "-p", PROMPT, "--show-drafts") == expected(api).text
    options = [
        "--engine-dir",
        str(engine),
        "-p",
        PROMPT,
        "-n",
        str(COUNT),
        "--no-stats",
        "--show-drafts",
        "--no-guard",
    ]
    coloured = CliRunner().invoke(main, options, color=True).stdout
    assert "\x1b[32m" in coloured and click.unstyle(coloured) == expected(api).text + "\n"


def test_chat_prompts_are_messages(engine: Path, api: LLM) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    assert api.codec.render(messages) == f"<user>{PROMPT}<assistant>"
    assert (
        text_of(engine, "--chat", "-p", PROMPT)
        == expected(api, messages).text
        != expected(api).text
    )


def test_a_chat_on_a_terminal_keeps_the_conversation(engine: Path, api: LLM) -> None:
    messages: list[dict[str, str]] = []
    wanted = ""
    for line in ("hi", "and then"):
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": expected(api, messages).text})
        wanted += f"> {messages[-1]['content']}\n"
    master, slave = pty.openpty()
    os.write(master, b"hi\n\nand then\n\x04")
    command = [
        *COMMAND,
        "--engine-dir",
        str(engine),
        "--chat",
        "-n",
        str(COUNT),
        "--no-stats",
        "--threads",
        "1",
    ]
    done = subprocess.run(command, stdin=slave, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.replace("> > ", "> ") == wanted + "> "


def test_ctrl_c_ends_without_a_traceback(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C the printed text remains, and the exit code is the one that shells expect."""

    def stream(*_: Any, **__: Any) -> Iterator[Piece]:
        yield Piece("some text", 5, False)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", stream)
    result = run(main, "--engine-dir", engine, "-p", PROMPT)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "some text", "\n")


def test_doctor_shows_packages_machine_and_jobs() -> None:
    facts = json.loads(succeed(doctor.main, "--json").stdout)
    assert facts.keys() == {"packages", "machine", "jobs"}
    assert facts["packages"]["eesd"] == eesd.__version__ and facts["jobs"][
        "run on the CPU (ort)"
    ].startswith("yes")
    assert "CPUExecutionProvider" in facts["machine"]["onnxruntime providers"]
    table = succeed(doctor.main).stdout
    assert all(word in table for word in (*facts["packages"], *facts["machine"], "export"))


def test_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(doctor, "installed", lambda _: None)
    monkeypatch.setattr(machine, "nvidia_driver", lambda: False)
    succeed(doctor.main)
    facts = json.loads(succeed(doctor.main, "--json").stdout)
    for package, extra in (("torch", "torch"), ("onnx", "export"), ("accelerate", "distill")):
        assert facts["packages"][package] == f"not installed: {machine.pip_install(extra)}"
    assert (
        facts["jobs"]["export"].startswith("no: onnx")
        and machine.pip_install() in facts["jobs"]["run on the CPU (ort)"]
    )
    assert "cannot be loaded" in facts["machine"]["onnxruntime providers"]


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo NVIDIA H100, 81559 MiB, 580.1, 9.0", "NVIDIA H100"),
        ("exit 9", "the NVIDIA driver does not answer"),
    ],
)
def test_doctor_asks_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: str
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert found in json.loads(succeed(doctor.main, "--json").stdout)["machine"]["GPU"]


def test_speculation_options_reach_the_engine(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    original = llm.load

    def load(*arguments: Any, **options: Any) -> llm.LLM:
        seen.append(options)
        return original(*arguments, **options)

    monkeypatch.setattr("eesd.runtime.cli.load", load)
    text_of(
        engine,
        "-p",
        PROMPT,
        "--controller",
        "fixed:k=2",
        "--tree",
        2,
        "--no-guard",
        "--seed",
        3,
        "--threads",
        1,
    )
    assert (
        seen[0]["speculation"] == Speculation("fixed:k=2", 2, False, 3) and seen[0]["threads"] == 1
    )
