"""Gather prompts for training the head from checkouts of public repositories. Questions of the test
sets are left out.

    python -m lab.smollm2.prompts CHECKOUTS -o prompts.jsonl --without spec_bench.jsonl [FILE ...]

CHECKOUTS has a directory for each repository of ``SOURCES``, named like the repository
(``git clone URL CHECKOUTS/NAME``). The result has one conversation per line, which includes the
conversation's kind. The seed determines the order.
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
    "self-instruct": (
        "https://github.com/yizhongw/self-instruct (Apache-2.0; prompts of T0's training set)"
    ),
    "GPTeacher": "https://github.com/teknium1/GPTeacher (MIT)",
    "UD_German-GSD": "https://github.com/UniversalDependencies/UD_German-GSD (CC BY-SA 4.0)",
    "zero_shot_cot": (
        "https://github.com/kojima-takeshi188/zero_shot_cot (names no licence; CommonsenseQA's "
        "training set)"
    ),
    "dstc8-schema-guided-dialogue": (
        "https://github.com/google-research-datasets/dstc8-schema-guided-dialogue (CC BY-SA 4.0)"
    ),
}
GRAM = 13
"""Number of consecutive words that a prompt must not have in common with a test."""
PER_KIND = 350
"""Number of prompts of each kind of T0's tasks, unless all prompts are wanted."""
HELD_OUT = 256
"""Number of prompts of T0 that no training uses."""
MORE = {
    "cnn": 900,
    "samsum": 900,
    "kilt": 900,
    "wiki": 900,
    "xsum": 900,
    "adversarial": 800,
    "duorc": 700,
    "multi": 600,
}
"""The kinds of which more prompts are taken."""
CHOICES = 2000
DIALOGUES = 2500
AGAIN = 2500
"""These are the numbers of multiple-choice prompts, of prompts from dialogues, and of prompts with
a second turn."""
MOST_CHARACTERS = 2400
ASKED_AGAIN = (
    *(
        "Make it shorter.",
        "Rewrite your answer as a list.",
        "Can you explain that in more detail?",
        "Now write it for a child.",
    ),
    *(
        "Give another example.",
        "What could go wrong?",
        "Translate your answer to German.",
        "Why?",
        "Now do it in another style.",
    ),
    "Summarize your answer in one sentence.",
)
TO_ENGLISH = (
    "Translate German to English: {}",
    "Translate this sentence into English:\n{}",
    "What does this mean in English? {}",
)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def grams(text: str) -> set[tuple[str, ...]]:
    """Return all runs of ``GRAM`` words. A shorter text is one run."""
    found = words(text)
    return {tuple(found[i : i + GRAM]) for i in range(max(1, len(found) - GRAM + 1))}


def math(checkout: Path) -> Iterator[str]:
    for line in (checkout / "grade_school_math/data/train.jsonl").read_text("utf-8").splitlines():
        yield json.loads(line)["question"]


class T0:
    """T0's training set.

    Attributes:
        asked: Maps the prompts that the model answers to their kinds.
        held_out: Maps the prompts that no training uses to their kinds.
        read: Maps the other prompts to their answers.
    """

    def __init__(self, checkout: Path, every: bool) -> None:
        self.asked: dict[str, str] = {}
        self.held_out: dict[str, str] = {}
        self.read: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for kind, prompt, answer in _t0(checkout):
            if prompt in self.asked or prompt in self.held_out:
                continue
            fits = 3 <= len(prompt) <= MOST_CHARACTERS
            if fits and len(self.held_out) < HELD_OUT:
                self.held_out[prompt] = kind
            elif fits and (every or counts[kind] < MORE.get(kind, PER_KIND)):
                counts[kind] += 1
                self.asked[prompt] = kind
            else:
                self.read[prompt] = answer


def _t0(checkout: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the kind, the prompt and the completion of each task in random order."""
    paths = sorted((checkout / "data/finetuning/t0_train_50k/data_per_template").glob("*.jsonl"))
    entries = [
        (path, json.loads(line)) for path in paths for line in path.read_text("utf-8").splitlines()
    ]
    found = [
        (
            re.split(r"[_.]", path.name)[0],
            e["prompt"].strip(),
            e["completion"].removesuffix("<|endoftext|>").strip(),
        )
        for path, e in entries
    ]
    random.Random(7).shuffle(found)
    yield from found


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the questions and answers of GPTeacher."""
    for entry in json.loads(path.read_text("utf-8")):
        yield "\n".join(filter(None, (entry["instruction"], entry["input"]))), entry["response"]


def seeds(checkout: Path) -> Iterator[str]:
    for line in (checkout / "data/seed_tasks.jsonl").read_text("utf-8").splitlines():
        entry = json.loads(line)
        yield "\n".join(filter(None, (entry["instruction"], entry["instances"][0]["input"])))


def german(checkout: Path) -> Iterator[str]:
    for path in sorted(checkout.glob("*.conllu")):
        for number, text in enumerate(
            re.findall(r"^# text = (.*)$", path.read_text("utf-8"), re.MULTILINE)
        ):
            yield TO_ENGLISH[number % len(TO_ENGLISH)].format(text)


def choices(checkout: Path, rng: random.Random) -> Iterator[str]:
    """Yield the questions of CommonsenseQA. Half of them have answers to choose from."""
    lines = (
        (checkout / "dataset/CommonsenseQA/train_rand_split.jsonl").read_text("utf-8").splitlines()
    )
    for line in rng.sample(lines, min(CHOICES, len(lines))):
        question = json.loads(line)["question"]
        offered = " ".join(
            f"({choice['label']}) {choice['text']}" for choice in question["choices"]
        )
        asked = f"{question['stem']}\nAnswer choices: {offered}\nExplain your answer."
        yield question["stem"] if rng.random() < 0.5 else asked


def dialogues(checkout: Path) -> list[list[str]]:
    """Return dialogues in random order. Each is a list of the turns of user and assistant. The
    first ``DIALOGUES`` dialogues are prompts, and the model reads all others."""
    found = []
    for path in sorted((checkout / "train").glob("dialogues_*.json")):
        for dialogue in json.loads(path.read_text("utf-8")):
            turns: list[str] = []
            for number, turn in enumerate(dialogue["turns"]):
                if number and turn["speaker"] == dialogue["turns"][number - 1]["speaker"]:
                    turns[-1] += " " + turn["utterance"]
                else:
                    turns.append(turn["utterance"])
            found.append(turns)
    random.Random(7).shuffle(found)
    return found


def gathered(
    checkouts: Path, tasks: T0, rng: random.Random
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the kind and the turns of all prompts that are not held out."""
    code = [*instructions(checkouts / "GPTeacher/Codegen/codegen-instruct.json")]
    roleplay = [
        *instructions(
            checkouts / "GPTeacher/Roleplay/roleplay-simple-deduped-roleplay-instruct.json"
        )
    ]
    yield from (("math", (text,)) for text in math(checkouts / "grade-school-math"))
    yield from ((kind, (text,)) for text, kind in tasks.asked.items())
    yield from (("seed", (text,)) for text in seeds(checkouts / "self-instruct"))
    yield from (("code", (question,)) for question, _ in code)
    yield from (("roleplay", (question,)) for question, _ in roleplay)
    yield from (("german", (text,)) for text in german(checkouts / "UD_German-GSD"))
    yield from (("choice", (text,)) for text in choices(checkouts / "zero_shot_cot", rng))
    for turns in dialogues(checkouts / "dstc8-schema-guided-dialogue")[:DIALOGUES]:
        yield "dialogue", tuple(turns[: 2 * rng.randrange(1, max(2, len(turns) // 2)) - 1])
    pairs = [*roleplay, *code]
    for question, answer in rng.sample(pairs, min(AGAIN, len(pairs))):
        yield (
            "second turn",
            (
                question,
                answer,
                rng.choice(ASKED_AGAIN) if rng.random() < 0.7 else rng.choice(pairs)[0],
            ),
        )


def strings(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value."""
    if isinstance(value, str):
        yield value
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def tested(paths: Iterable[Path]) -> set[tuple[str, ...]]:
    """Return all runs of words of the tests."""
    lines = (line for path in paths for line in path.read_text("utf-8").splitlines())
    return {gram for line in lines for text in strings(json.loads(line)) for gram in grams(text)}


def write(
    output: Path,
    found: Iterable[tuple[str, tuple[str, ...]]],
    tests: set[tuple[str, ...]],
    seed: int,
) -> None:
    """Write the prompts as JSON lines in random order, without duplicates and without prompts of
    the tests."""
    kept: dict[tuple[str, ...], str] = {}
    counts: Counter[str] = Counter()
    for kind, turns in found:
        text = "\n".join(turns)
        if turns in kept or not 3 <= len(text) <= MOST_CHARACTERS:
            counts["left out: double, empty or long"] += 1
        elif any(not tests.isdisjoint(grams(one)) for one in (text, *turns)):
            counts["left out: like a test"] += 1
        else:
            kept[turns] = kind
            counts[kind] += 1
    order = list(kept.items())
    random.Random(seed).shuffle(order)
    with output.open("w", encoding="utf-8") as file:
        for turns, kind in order:
            messages = [
                {"role": ("user", "assistant")[i % 2], "content": turn}
                for i, turn in enumerate(turns)
            ]
            file.write(json.dumps({"kind": kind, "messages": messages}, ensure_ascii=False) + "\n")
    print(len(order), "prompts:", dict(sorted(counts.items())))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--every", action="store_true", help="every prompt of T0, not some of each kind"
    )
    parser.add_argument(
        "--held-out", type=Path, help="JSON lines of the prompts that nothing is trained on"
    )
    parser.add_argument(
        "--without",
        type=Path,
        nargs="*",
        default=(),
        help="JSON lines of tests, of which no prompt may be",
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    tasks = T0(arguments.checkouts / "self-instruct", arguments.every)
    found = gathered(arguments.checkouts, tasks, random.Random(arguments.seed))
    write(arguments.output, found, tested(arguments.without), arguments.seed)
    if arguments.held_out is not None:
        write(
            arguments.held_out,
            ((kind, (text,)) for text, kind in tasks.held_out.items()),
            set(),
            arguments.seed,
        )


if __name__ == "__main__":
    main()
