"""Gather the prompts on which the head is trained, from checkouts of public repositories, without any question of a test.

    prompts.py CHECKOUTS -o prompts.jsonl --without spec_bench.jsonl [FILE ...]

CHECKOUTS has a directory for each repository of ``SOURCES``, named as the repository is (``git clone URL CHECKOUTS/NAME``).
The result has one conversation a line, in an order that its seed fixes, and the kind of each.
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SOURCES = {
    "grade-school-math": "https://github.com/openai/grade-school-math (MIT)",
    "self-instruct": "https://github.com/yizhongw/self-instruct (Apache-2.0; prompts of T0's training set)",
    "GPTeacher": "https://github.com/teknium1/GPTeacher (MIT)",
    "UD_German-GSD": "https://github.com/UniversalDependencies/UD_German-GSD (CC BY-SA 4.0)",
}
GRAM = 13
"""Words in a row that a prompt must not have in common with a test."""
PER_TEMPLATE = 90
"""Prompts of each of T0's templates."""
MOST_CHARACTERS = 2800
TO_ENGLISH = (
    "Translate German to English: {}",
    "Translate this sentence into English:\n{}",
    "What does this mean in English? {}",
)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def grams(text: str) -> set[tuple[str, ...]]:
    """All runs of ``GRAM`` words; a shorter text is one run."""
    found = words(text)
    return {tuple(found[i : i + GRAM]) for i in range(max(1, len(found) - GRAM + 1))}


def math(checkout: Path) -> Iterator[str]:
    for line in (checkout / "grade_school_math/data/train.jsonl").read_text("utf-8").splitlines():
        yield json.loads(line)["question"]


def tasks(checkout: Path) -> Iterator[tuple[str, str]]:
    """Kind and prompt of T0's templates, and the questions of two of them alone."""
    for path in sorted((checkout / "data/finetuning/t0_train_50k/data_per_template").glob("*.jsonl")):
        prompts = [json.loads(line)["prompt"].strip() for line in path.read_text("utf-8").splitlines()]
        kind = re.split(r"[_.]", path.name)[0]
        yield from ((kind, prompt) for prompt in prompts[:PER_TEMPLATE])
        if kind in ("wiki", "trec", "kilt"):
            for prompt in prompts:
                question = re.search(r"(?:[Qq]uestion: ?|answer this: )([^\n]*?) ?\?", prompt)
                if question and len(words(question[1])) > 3:
                    yield "question", question[1] + "?"


def instructions(path: Path) -> Iterator[str]:
    for entry in json.loads(path.read_text("utf-8")):
        yield "\n".join(filter(None, (entry["instruction"], entry["input"])))


def seeds(checkout: Path) -> Iterator[str]:
    for line in (checkout / "data/seed_tasks.jsonl").read_text("utf-8").splitlines():
        entry = json.loads(line)
        yield "\n".join(filter(None, (entry["instruction"], entry["instances"][0]["input"])))


def german(checkout: Path) -> Iterator[str]:
    for path in sorted(checkout.glob("*.conllu")):
        for number, text in enumerate(re.findall(r"^# text = (.*)$", path.read_text("utf-8"), re.MULTILINE)):
            yield TO_ENGLISH[number % len(TO_ENGLISH)].format(text)


def gathered(checkouts: Path) -> Iterator[tuple[str, str]]:
    """Kind and text of all prompts."""
    yield from (("math", text) for text in math(checkouts / "grade-school-math"))
    yield from tasks(checkouts / "self-instruct")
    yield from (("seed", text) for text in seeds(checkouts / "self-instruct"))
    yield from (("code", text) for text in instructions(checkouts / "GPTeacher/Codegen/codegen-instruct.json"))
    roleplay = checkouts / "GPTeacher/Roleplay/roleplay-simple-deduped-roleplay-instruct.json"
    yield from (("roleplay", text) for text in instructions(roleplay))
    yield from (("german", text) for text in german(checkouts / "UD_German-GSD"))


def strings(value: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(inner)


def tested(paths: Iterable[Path]) -> set[tuple[str, ...]]:
    """All runs of words of the tests."""
    lines = (line for path in paths for line in path.read_text("utf-8").splitlines())
    return {gram for line in lines for text in strings(json.loads(line)) for gram in grams(text)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--without", type=Path, nargs="*", default=(), help="JSON lines of tests, of which no prompt may be")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    tests = tested(arguments.without)
    kept: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for kind, text in gathered(arguments.checkouts):
        if text in kept or not 3 <= len(text) <= MOST_CHARACTERS:
            counts["left out: double, empty or long"] += 1
        elif not tests.isdisjoint(grams(text)):
            counts["left out: like a test"] += 1
        else:
            kept[text] = kind
            counts[kind] += 1
    order = list(kept.items())
    random.Random(arguments.seed).shuffle(order)
    with arguments.output.open("w", encoding="utf-8") as file:
        for text, kind in order:
            file.write(json.dumps({"kind": kind, "messages": [{"role": "user", "content": text}]}, ensure_ascii=False) + "\n")
    print(len(order), "prompts:", dict(sorted(counts.items())))


if __name__ == "__main__":
    main()
