"""Tests that compare the runtime with ``examples/one_round.py`` and ``examples/embedding/cpp``,
which run rounds without optimizations. ``examples/embedding/controllers.py`` uses the controllers
in a loop that is not EESD's."""

import json
import shutil
import socket
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from runpy import run_path
from subprocess import PIPE, Popen
from typing import Any

import numpy as np
import pytest
from support import fake_tensorrt as fake
from support import tiny_models
from support.command import assert_one_line
from support.harness import Harness

import eesd
from eesd.common.manifest import MANIFEST_FILE
from eesd.controllers import CONTROLLERS, make_controller
from eesd.runtime.engines.trt_plans import make_logger

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/one_round.py"
LOOP = ROOT / "examples/embedding/controllers.py"
SOURCES = (ROOT / "examples/embedding/cpp/one_round.cpp", ROOT / "tests/support/tensorrt/fake.cpp")
STRICT = (
    "-std=c++17",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)
TYPES = {"tensor(float)": 0, "tensor(float16)": 1, "tensor(int64)": 8}  # of TensorRT's DataType
PROMPTS = [[5], [5, 9, 3], [60, 2, 44, 44, 17, 8, 90, 31], [*range(3, 60)]]
HEADS = [
    *(("harness", length) for length in (0, 1, 3, 12)),
    ("reduced_harness", 3),
    ("two_block_harness", 3),
]
Damage = Callable[[dict[str, Any]], object]
RUN = "plans 3 40 5"
VERIFY = "verify.onnx"


@pytest.mark.fast
@pytest.mark.parametrize("prompt", PROMPTS[:3])
def test_the_runtime_gives_the_tokens_of_the_example(harness: Harness, prompt: list[int]) -> None:
    tokens = run_path(str(EXAMPLE))["generate"](harness.directory, prompt, 40)
    assert (
        eesd.load(harness.directory, threads=1).generate(prompt, max_new_tokens=40).tokens == tokens
    )


def test_architecture_shows_the_round_of_the_example() -> None:
    page = (
        (ROOT / "ARCHITECTURE.md")
        .read_text("utf-8")
        .partition("A round of this program:\n\n")[2]
        .partition("\nThe runtime's")[0]
    )
    assert "drafted = list" in page and page.replace(
        "\n    ", "\n        "
    ).strip() in EXAMPLE.read_text("utf-8")


@pytest.mark.fast
@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_controller_in_another_loop_changes_the_seconds_and_not_the_tokens(name: str) -> None:
    """The seconds come from the cost constants of the toy, not from the machine."""
    toy = run_path(str(LOOP))
    plain = [3]
    for position in range(3, 303):
        plain.append(int(toy["VERIFIER"][toy["row"](plain[-1], position)].argmax()))
    tokens, seconds = toy["generate"](make_controller(name), [1, 2, 3], 300)
    assert tokens == plain[1:] and seconds < 0.9 * 300 * (toy["PASS"] + toy["NODE"])


def test_another_loop_needs_no_engine_and_the_default_controller_is_fastest() -> None:
    code = (
        f"import runpy, sys; runpy.run_path({str(LOOP)!r}, run_name='__main__'); "
        "print(*sys.modules)"
    )
    *lines, names = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    speed = {line.split()[0]: float(line.split()[1]) for line in lines}
    assert max(speed, key=lambda name: speed[name]) == "cost-aware-ts"
    assert not [
        name for name in names.split() if name.startswith(("eesd.runtime", "torch", "onnx"))
    ]


class Gpu:
    """Answers the requests of ``tests/support/tensorrt/fake.cpp``. Each line has the name of a
    method of the fake of TensorRT's Python API, the number of an object, and the arguments. A call
    is checked at once, but it is computed only when the program waits."""

    def __init__(self) -> None:
        self._trt = fake.module("tensorrt")
        self._errors = list[str]()
        self._work = list[Callable[[], None]]()
        self._objects: list[Any] = [self._trt.Runtime(make_logger(self._trt, self._errors))]

    def run(self, program: Path, *arguments: object) -> tuple[int, str, str]:
        """Run a program with the socket as standard input. Returns the exit code, the output and
        the errors."""
        self._memory = np.memmap(program.with_name("device"), np.uint8, "w+", shape=1 << 28)
        ours, theirs = socket.socketpair()
        command = [str(program), *map(str, arguments)]
        fd = theirs.fileno()
        with (
            Popen(command, stdin=fd, text=True, stdout=PIPE, stderr=PIPE) as process,
            ours,
            ours.makefile() as lines,
        ):
            theirs.close()
            for line in lines:
                ours.sendall(f"{self._answer(*line.split())}\n".encode())
            output, errors = process.communicate()
        return process.returncode, output, errors

    def _answer(self, method: str, number: str = "0", *given: str) -> object:
        one, args = (
            self._objects[int(number)],
            [literal_eval(one) if one[0] in "(0123456789" else one for one in given],
        )
        match method:
            case "memory":
                return f"{self._memory.ctypes.data} {self._memory.filename}"
            case "tensor":
                tensor = (one._inputs | one._outputs).get(given[0])
                return (
                    "0 0"
                    if tensor is None
                    else f"{1 if given[0] in one._inputs else 2} {TYPES[tensor.type]}"
                )
            case "work":
                return self._work.pop(0)()
            case "load":
                made = one.deserialize_cuda_engine(bytes.fromhex(given[0][1:]))
            case "context":
                made = one.create_execution_context(
                    self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
                )
                work = made._work
                made._work = lambda: partial(self._work.append, work())
            case _:
                found = getattr(one, method)
                return found(*args) if callable(found) else found
        self._objects.append(made)
        return f"!{self._errors[0].splitlines()[0]}" if made is None else len(self._objects) - 1


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ example, compiled with ``fake.cpp``."""
    if sys.platform != "linux" or not shutil.which("g++"):
        pytest.skip("needs g++ and Linux")
    path = tmp_path_factory.mktemp("program") / "one_round"
    subprocess.run(["g++", *STRICT, f"-I{SOURCES[1].parent}", *SOURCES, "-o", path], check=True)
    return path


@pytest.fixture
def plans(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Plans of a harness that the test may damage."""
    directory = request.getfixturevalue(getattr(request, "param", "harness")).directory
    fake.write_plans(shutil.copytree(directory, tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.mark.parametrize(("plans", "length"), HEADS, indirect=["plans"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_the_program_in_c_has_the_tokens_of_plain_decoding_and_the_rounds_of_a_fixed_draft(
    plans: Path, program: Path, prompt: list[int], length: int
) -> None:
    fixed = eesd.Speculation(f"fixed:k={length}", guard=False, drafter="exit") if length else None
    runs = (eesd.load(plans, "ort", threads=1, speculation=how) for how in (None, fixed))
    plain, drafted = (llm.generate(prompt, max_new_tokens=40) for llm in runs)
    average = len(plain.tokens) / drafted.stats.rounds
    assert (average > 1) == (length > 0)
    text = f"{' '.join(map(str, plain.tokens))}\n{average:.2f} tokens a round\n"
    assert Gpu().run(program, plans, length, 40, *prompt) == (0, text, "")


def test_the_program_in_c_fills_a_cache_of_16_bits(program: Path, tmp_path: Path) -> None:
    model = tiny_models.build(tmp_path / "model", 97, layers=3, damping=0.3, seed=0)
    prompt = PROMPTS[1]
    plans = tiny_models.export_tiny(
        model, tmp_path / "plans", slots=len(prompt) + 40, dtype="float16"
    )
    fake.write_plans(plans)
    found = {Gpu().run(program, plans, length, 40, *prompt)[1].splitlines()[0] for length in (0, 3)}
    tokens = eesd.load(plans, "ort", threads=1).generate(prompt, max_new_tokens=40).tokens
    assert len(tokens) == 40 and found == {" ".join(map(str, tokens))}


@pytest.mark.parametrize(
    ("arguments", "damage", "words"),
    [
        ("plans 3 40", len, "Usage: one_round"),
        ("none 3 40 5", len, "none/manifest.json cannot be read (No such file or directory)"),
        ("plans 3 40 5 97", len, "an id outside of the vocabulary of 97 tokens"),
        ("plans 13 40 5", len, "drafts at most 12 tokens"),
        ("plans 3 380 5 9 3 4 5", len, "5 tokens and 380 new ones need more than the 384 slots"),
        (
            RUN,
            lambda made: made.update(format_version=2),
            "has format version 2, and this program reads version 1",
        ),
        (
            RUN,
            lambda made: made.update(max_seq_len=1.5),
            'has another "max_seq_len" than an integer from 1',
        ),
        (
            RUN,
            lambda made: made["verify"][0]["inputs"][3].update(dtype="int4"),
            'the type "int4", which this program',
        ),
        (
            RUN,
            lambda made: made["verify"].append(made["verify"][0]),
            "has 2 stages, and this program runs one",
        ),
        (
            RUN,
            lambda made: made["plans"].pop("draft.onnx"),
            "has no plan of draft.onnx; build it with: eesd-build",
        ),
        (RUN, lambda made: made["plans"][VERIFY].update(file="../x"), "names a plan outside"),
        (
            RUN,
            lambda made: made["plans"][VERIFY].update(refit="7"),
            "holds no weights, which this program cannot give it",
        ),
        (
            RUN,
            lambda made: made["plans"][VERIFY].update(size=7),
            "bytes where the manifest says 7; build it again with: eesd",
        ),
        (
            RUN,
            lambda made: made["plans"]["draft.onnx"].update(file="a", size=2),
            "a (Magic tag does not match)",
        ),
    ],
)
def test_the_program_refuses_in_a_sentence(
    plans: Path, program: Path, arguments: str, damage: Damage, words: str
) -> None:
    path = plans / MANIFEST_FILE
    (directory, *more) = arguments.split()
    manifest = json.loads(path.read_text())
    damage(manifest)
    path.write_text(json.dumps(manifest))
    path.with_name("a").write_text("no")
    code, output, errors = Gpu().run(program, plans.with_name(directory), *more)
    assert (code, output) == (2, "")
    assert_one_line(errors, words)


def test_the_program_survives_damaged_manifests(plans: Path, program: Path) -> None:
    """If pieces are missing, doubled or exchanged, the program ends with a sentence, or the damage
    does not affect what it reads."""
    path = plans / MANIFEST_FILE
    random = Random(0)
    gpu = Gpu()
    whole = path.read_text()
    for _ in range(60):
        first, last = sorted(random.randrange(len(whole)) for _ in range(2))
        piece = random.choice(["", "[" * 9000, '"', "-", "\\u12", "9" * 30, whole[first:last] * 2])
        path.write_text(whole[:first] + piece + whole[min(last, first + random.randrange(9)) :])
        code, _, errors = gpu.run(program, plans, 2, 2, 5)
        assert code == 0 or (
            code == 2 and errors.startswith("error: ") and errors.count("\n") == 1
        ), errors
