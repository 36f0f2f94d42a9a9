"""``examples/smollm2/texts.py``: what it makes of packages and checkouts, and that no text of a test is in it."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent.parent / "examples/smollm2/texts.py"
SENTENCE = "Every paragraph of this page says something that the page before it did not say at all. "
SECRET = "which of these seven small wooden boats crossed the cold northern sea first that year"


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_pages_are_words_and_tests_are_left_out(tmp_path: Path) -> None:
    packages, checkouts = tmp_path / "packages", tmp_path / "checkouts"
    body = "".join(f"<p>{number}. {SENTENCE * 6}</p>" for number in range(12))
    page = f"<html><head><title>no</title></head><nav>Next</nav><body>{body}<script>var no;</script></body></html>"
    write(packages / "anarchism/html/secA.html", page)
    write(packages / "jargon-text/jargon.txt.gz", gzip.compress(f"{SENTENCE * 6}{SECRET}.".encode()))
    write(packages / "golang-1.19-src/a.go", "func f() {\n\treturn\n}\n" * 40)
    solved = [{"question": "What is 1 + 1?", "answer": "It is <<1+1=2>>2."}, {"question": SECRET, "answer": "The red one."}]
    write(checkouts / "grade-school-math/grade_school_math/data/train.jsonl", "".join(json.dumps(one) + "\n" for one in solved))
    write(tmp_path / "test.jsonl", json.dumps({"turns": [f"Say {SECRET}?"]}) + "\n")
    command = (sys.executable, SCRIPT, packages, checkouts, "-o", tmp_path / "out", "--without", tmp_path / "test.jsonl")
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    essays = lines(tmp_path / "out/essays.jsonl")
    assert {tuple(sorted(entry)) for entry in essays} == {("kind", "text"), ("kind", "messages")}
    for entry in essays:
        parts = [entry["text"]] if "text" in entry else [message["content"] for message in entry["messages"]]
        assert SENTENCE.strip() in " ".join(parts) and not any(word in "".join(parts) for word in ("Next", "var no", "<p>"))
        assert "text" in entry or [message["role"] for message in entry["messages"]] == ["user", "assistant"]
    assert [entry["text"][:8] for entry in lines(tmp_path / "out/code.jsonl")] == ["func f()"]
    assert [entry["messages"][1]["content"] for entry in lines(tmp_path / "out/answered.jsonl")] == ["It is 2."]
    assert "'left out: like a test': 2" in done.stdout
