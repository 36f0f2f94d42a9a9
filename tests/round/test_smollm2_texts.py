"""Tests of the texts that ``lab/smollm2/texts.py`` and ``prompts.py`` make from packages and
checkouts. These texts contain no questions of the test sets."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent.parent
SENTENCE = (
    "Every paragraph of this page says something that the page before it did not say at all. "
)
SECRET = "which of these seven small wooden boats crossed the cold northern sea first that year"


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_pages_are_words_and_tests_are_left_out(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    checkouts = tmp_path / "checkouts"
    body = "".join(f"<p>{number}. {SENTENCE * 6}</p>" for number in range(12))
    page = (
        f"<html><head><title>no</title></head><nav>Next</nav><body>{body}<script>var "
        "no;</script></body></html>"
    )
    write(packages / "anarchism/html/secA.html", page)
    write(
        packages / "jargon-text/jargon.txt.gz", gzip.compress(f"{SENTENCE * 6}{SECRET}.".encode())
    )
    write(packages / "golang-1.19-src/a.go", "func f() {\n\treturn\n}\n" * 40)
    solved = [
        {"question": "What is 1 + 1?", "answer": "It is <<1+1=2>>2."},
        {"question": SECRET, "answer": "The red one."},
    ]
    write(
        checkouts / "grade-school-math/grade_school_math/data/train.jsonl",
        "".join(json.dumps(one) + "\n" for one in solved),
    )
    write(tmp_path / "test.jsonl", json.dumps({"turns": [f"Say {SECRET}?"]}) + "\n")
    command = (
        sys.executable,
        "-m",
        "lab.smollm2.texts",
        packages,
        checkouts,
        "-o",
        tmp_path / "out",
        "--without",
        tmp_path / "test.jsonl",
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    essays = lines(tmp_path / "out/essays.jsonl")
    assert {tuple(sorted(entry)) for entry in essays} == {("kind", "text"), ("kind", "messages")}
    for entry in essays:
        parts = (
            [entry["text"]]
            if "text" in entry
            else [message["content"] for message in entry["messages"]]
        )
        assert SENTENCE.strip() in " ".join(parts) and not any(
            word in "".join(parts) for word in ("Next", "var no", "<p>")
        )
        assert "text" in entry or [message["role"] for message in entry["messages"]] == [
            "user",
            "assistant",
        ]
    assert [entry["text"][:8] for entry in lines(tmp_path / "out/code.jsonl")] == ["func f()"]
    assert [
        entry["messages"][1]["content"] for entry in lines(tmp_path / "out/answered.jsonl")
    ] == ["It is 2."]
    assert "'left out: like a test': 2" in done.stdout


def test_manuals_are_words_and_are_asked_about(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    checkouts = tmp_path / "checkouts"
    manual = (
        f'.\\" no\n.TH no 1\n.SH NAME\n{SENTENCE * 5}\n.PP\n.BR two " words"\n\\fIthree\\fP '
        "well\\-known \\(lqquotes\\(rq.\n"
    )
    write(packages / "manpages/man1/a.1.gz", gzip.compress(manual.encode()))
    write(
        packages / "perl-doc/a.pod",
        f"=head1 NAME\n\nB<bold> and L<< C<code> >>.\n\n=over 4\n\n{SENTENCE * 5}\n",
    )
    (packages / "openjdk-17-source").mkdir()
    with ZipFile(packages / "openjdk-17-source/src.zip", "w") as archive:
        archive.writestr("java.base/java/A.java", "/*\n * no\n */\n" + "class A { int a; }\n" * 40)
        archive.writestr("java.desktop/B.java", "class B { int no; }\n" * 40)
    write(packages / "dict-gcide/gcide.index", "alder\tA\tB\n00-database\tA\tB\n")
    write(packages / "dict-foldoc/foldoc.index", "kernel\tA\tB\n")
    write(checkouts / "grade-school-math/grade_school_math/data/train.jsonl", "")
    output = tmp_path / "out"
    asked = tmp_path / "asked.jsonl"
    command = (
        sys.executable,
        "-m",
        "lab.smollm2.texts",
        packages,
        checkouts,
        "-o",
        output,
        "--asked",
        asked,
    )
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)

    whole = [
        entry["text"]
        if "text" in entry
        else "".join(message["content"] for message in entry["messages"])
        for entry in lines(output / "reference.jsonl")
    ]
    assert not any(word in text for text in whole for word in ("no 1", "=over", "\\", ".PP"))
    assert any('two  words\nthree well-known "quotes".' in text for text in whole)
    assert any("NAME\n\nbold and code." in text for text in whole)
    assert [entry["text"][:9] for entry in lines(output / "code.jsonl")] == ["class A {"]
    kinds = {entry["kind"] for entry in lines(asked)}
    assert kinds == {"about reference", "about code", "topic"}
    assert all(
        set(words(entry)) & {"alder", "kernel"}
        for entry in lines(asked)
        if entry["kind"] == "topic"
    )


def words(entry: dict[str, Any]) -> list[str]:
    return str(entry["messages"][0]["content"]).strip("?.").split()


def test_prompts_have_turns_and_no_tests(tmp_path: Path) -> None:
    checkouts = tmp_path / "checkouts"
    write(
        checkouts / "grade-school-math/grade_school_math/data/train.jsonl",
        json.dumps({"question": "What is 1 + 1?"}) + "\n",
    )
    seed = {"instruction": f"Say {SECRET}?", "instances": [{"input": ""}]}
    write(checkouts / "self-instruct/data/seed_tasks.jsonl", json.dumps(seed) + "\n")
    templates = checkouts / "self-instruct/data/finetuning/t0_train_50k/data_per_template"
    rows = [
        {"prompt": f"Which is larger, {number} or 7?", "completion": "That one.<|endoftext|>"}
        for number in range(700)
    ]
    write(templates / "quarel_choose.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    for name in (
        "Codegen/codegen-instruct.json",
        "Roleplay/roleplay-simple-deduped-roleplay-instruct.json",
    ):
        entry = {"instruction": f"Do {name}", "input": "", "response": "Done."}
        write(checkouts / "GPTeacher" / name, json.dumps([entry]))
    choice = {
        "question": {"stem": "Where do boats go?", "choices": [{"label": "A", "text": "the sea"}]}
    }
    write(
        checkouts / "zero_shot_cot/dataset/CommonsenseQA/train_rand_split.jsonl",
        json.dumps(choice) + "\n",
    )
    said = [
        ("USER", "A table,"),
        ("USER", "please."),
        ("SYSTEM", "For how many?"),
        ("USER", "Two."),
        ("SYSTEM", "Done."),
    ]
    dialogue = {"turns": [{"speaker": speaker, "utterance": text} for speaker, text in said]}
    write(
        checkouts / "dstc8-schema-guided-dialogue/train/dialogues_001.json", json.dumps([dialogue])
    )
    write(tmp_path / "test.jsonl", json.dumps({"turns": [SECRET]}) + "\n")
    output = tmp_path / "prompts.jsonl"
    without = ("--without", tmp_path / "test.jsonl")
    held_out = tmp_path / "held-out.jsonl"
    command = (
        sys.executable,
        "-m",
        "lab.smollm2.prompts",
        checkouts,
        "-o",
        output,
        "--held-out",
        held_out,
        *without,
    )
    every = subprocess.run(
        [*command, "--every"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "'quarel': 444" in every.stdout, "all but those held out"
    held = {entry["messages"][0]["content"] for entry in lines(held_out)}
    assert len(held) == 256 and held.isdisjoint(
        entry["messages"][0]["content"] for entry in lines(output)
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    found = lines(output)
    assert "'quarel': 350" in done.stdout and "'left out: like a test': 1" in done.stdout
    assert {entry["kind"] for entry in found} == {
        "math",
        "quarel",
        "code",
        "roleplay",
        "choice",
        "dialogue",
        "second turn",
    }
    assert all(
        [m["role"] for m in e["messages"]] == ["user", "assistant", "user"][: len(e["messages"])]
        for e in found
    )
    assert [e["messages"][0]["content"] for e in found if e["kind"] == "dialogue"] == [
        "A table, please."
    ]
    assert {len(e["messages"]) for e in found if e["kind"] == "second turn"} == {3}
