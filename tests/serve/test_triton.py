"""Tests of the model repository for Triton. A real ``tritonserver`` runs it on the CPU."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import environments
from support.bundled import FORGED, prompts, with_turns
from support.command import assert_refused, run, succeed
from support.constrained import TOO_MUCH
from support.serving import eventually
from support.triton_server import TritonServer, triton_server

from eesd.common.errors import EESDError
from eesd.runtime.batch.scheduler import BatchOptions
from eesd.runtime.constraint import make_constraint
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import LLM, load
from eesd.serve.cli import main
from eesd.serve.triton.repository import (
    SETTINGS_FILE,
    Settings,
    read_settings,
    write_triton_repository,
)

CLIENT = Path(__file__).parent.parent / "support" / "triton_client.py"
LONG = 900
"""Length, in tokens, of a text that is still being generated when something happens to it."""
RUNNING = {"text_input": "import os\n", "max_tokens": LONG, "stream": True, "ignore_eos": True}


def test_the_command_writes_a_model_that_reads_back(engine: Path, tmp_path: Path) -> None:
    result = succeed(
        main,
        "--engine-dir",
        engine,
        "--triton-repo",
        tmp_path / "models",
        "--model-name",
        "one",
        "--backend",
        "ort",
        "--threads",
        1,
        "--max-rows",
        3,
        "--no-draft",
        "--plain-content",
    )
    model = tmp_path / "models" / "one"
    assert str(tmp_path / "models") in result.stdout
    assert sorted(str(path.relative_to(model)) for path in model.rglob("*")) == [
        "1",
        "1/eesd.json",
        "1/model.py",
        "config.pbtxt",
    ]
    assert read_settings(model / "1") == Settings(
        engine_dir=str(engine),
        backend="ort",
        threads=1,
        speculation=None,
        batch=BatchOptions(max_rows=3),
        plain_content=True,
    )
    config = (model / "config.pbtxt").read_text()
    for line in (
        'name: "one"',
        "decoupled: true",
        'name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true',
    ):
        assert line in config
    compile((model / "1" / "model.py").read_text(), "model.py", "exec")


def test_other_models_of_a_repository_stay(engine: Path, tmp_path: Path) -> None:
    write_triton_repository(engine, tmp_path, name="first")
    write_triton_repository(engine, tmp_path, name="second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


@pytest.mark.parametrize(
    ("engine_dir", "options", "words"),
    [
        ("missing", (), ("missing",)),
        ("plans", ("--model-name", "../up"), ("not a valid model name",)),
        ("plans", ("--model-name", "taken"), ("taken exists", "--model-name")),
        ("plans", ("--threads", "0"), ("threads is 0",)),
    ],
)
def test_what_cannot_be_written_is_refused(
    engine_copy: Path,
    tmp_path: Path,
    engine_dir: str,
    options: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    (tmp_path / "models" / "taken").mkdir(parents=True)
    assert_refused(
        run(
            main,
            "--engine-dir",
            engine_copy.with_name(engine_dir),
            "--triton-repo",
            tmp_path / "models",
            *options,
        ),
        *words,
    )
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"threads": "two"}, "threads is 'two'"),
        ({"batch": {"max_rows": 0}}, "max_rows is 0"),
        ({"batch": {"rows": 3}}, "rows"),
        ({"speculation": {"drafter": "neither"}}, "drafter is 'neither'"),
        ({"colour": "red"}, "colour"),
        ({"batch": [1]}, "do not fit"),
    ],
)
def test_settings_that_were_edited_wrongly_are_refused(
    engine: Path, tmp_path: Path, change: Any, words: str
) -> None:
    directory = write_triton_repository(engine, tmp_path) / "1"
    raw = json.loads((directory / SETTINGS_FILE).read_text())
    (directory / SETTINGS_FILE).write_text(json.dumps(raw | change))
    with pytest.raises(EESDError, match=words):
        read_settings(directory)


# The tests below use a real server. The server is started only once, and the last test kills its
# stub.


@pytest.fixture(scope="module")
def triton_python() -> Path:
    try:
        return environments.make("triton")
    except environments.Unavailable as reason:
        pytest.skip(f"no Triton here: {reason}")


@pytest.fixture(scope="module")
def server(
    triton_python: Path, bundled: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    scratch = tmp_path_factory.mktemp("triton")
    directory = with_turns(bundled, scratch / "plans")
    write_triton_repository(directory, scratch / "models", threads=1, plain_content=True)
    with triton_server(triton_python, scratch / "models", scratch) as server:
        yield server
    assert not server.stubs() and not server.shared_memory()


@pytest.fixture(scope="module")
def llm(bundled: Path) -> LLM:
    return load(bundled, threads=1)


class Client:
    """Sends requests and returns the responses to each."""

    def __init__(
        self,
        python: Path,
        server: TritonServer,
        requests: Sequence[dict[str, Any]],
        seconds: float = 60,
    ) -> None:
        command = [str(python), str(CLIENT), server.grpc, "eesd", str(seconds)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin
        self.process.stdin.write(json.dumps(requests))
        self.process.stdin.close()
        self.answers: list[list[dict[str, Any]]] = [[] for _ in requests]

    def next(self) -> dict[str, Any] | None:
        """Returns the next response to any request, or None if there are no more responses."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            return None
        answer: dict[str, Any] = json.loads(line)
        self.answers[answer["request"]].append(answer)
        return answer

    def all(self) -> list[list[dict[str, Any]]]:
        while self.next():
            pass
        assert all(answers and answers[-1]["final"] for answers in self.answers)
        return self.answers


def ids(answers: Sequence[dict[str, Any]]) -> list[int]:
    return [token for answer in answers for token in answer["ids"]]


def text(answers: Sequence[dict[str, Any]]) -> str:
    return "".join(answer["text"] for answer in answers)


def metric(server: TritonServer, name: str) -> float:
    """Returns the sum of a metric over all labels, or 0 if Triton does not have the metric yet."""
    lines = server.get("/metrics", server.metrics).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


@pytest.mark.slow
def test_many_streams_at_once_have_the_tokens_of_generate(
    triton_python: Path, server: TritonServer, llm: LLM
) -> None:
    texts = prompts()[:8]
    requests: list[dict[str, Any]] = []
    expected = []
    for number, prompt in enumerate(texts):
        sampling = (
            Sampling()
            if number % 2
            else Sampling(temperature=0.7, top_p=0.95, top_k=40, seed=2**40 + number)
        )
        inputs: dict[str, Any] = {
            "text_input": prompt,
            "max_tokens": 24 + 8 * number,
            "stream": number % 4 < 2,
        }
        if number % 2 == 0:
            inputs |= {
                "temperature": 0.7,
                "top_p": 0.95,
                "top_k": 40,
                "random_seed" if number % 4 else "seed": 2**40 + number,
            }
        if number == 5:
            del inputs["text_input"]
            inputs["input_ids"] = llm.encode(prompt)
        if number == 7:
            inputs["stop_words"] = ["", "\n\n"]
        requests.append({"inputs": inputs})
        stop = ["\n\n"] if number == 7 else []
        expected.append(llm.generate(prompt, sampling, max_new_tokens=24 + 8 * number, stop=stop))
    before = metric(server, "vllm:generation_tokens_total")
    found = Client(triton_python, server, requests).all()
    for request, answers, wanted in zip(requests, found, expected, strict=True):
        assert "error" not in answers[0], answers
        assert (ids(answers), text(answers)) == (wanted.tokens, wanted.text)
        assert [answer["reason"] for answer in answers] == [""] * (len(answers) - 1) + [
            wanted.finish_reason
        ]
        assert (len(answers) > 1) == request["inputs"]["stream"]
    assert metric(server, "vllm:generation_tokens_total") - before == sum(
        len(wanted.tokens) for wanted in expected
    )
    assert metric(server, "vllm:request_success_total") >= len(requests)
    assert metric(server, "vllm:time_to_first_token_seconds_count") >= len(requests)
    assert metric(server, "vllm:spec_decode_num_accepted_tokens_total") > 0


@pytest.mark.slow
def test_http_generates_with_the_names_of_nvidias_frontends(server: TritonServer, llm: LLM) -> None:
    wanted = llm.generate("import os\n", max_new_tokens=12)
    body = {"text_input": "import os\n", "max_tokens": 12, "exclude_input_in_output": False}
    answer = json.loads(server.post("/v2/models/eesd/generate", json.dumps(body).encode()))
    assert (
        answer["text_output"] == "import os\n" + wanted.text
        and answer["output_ids"] == wanted.tokens
    )
    events = server.post(
        "/v2/models/eesd/generate_stream", json.dumps(body | {"stream": True}).encode()
    ).split("\n\n")
    pieces = [json.loads(event.removeprefix("data: ")) for event in events if event]
    assert "".join(piece["text_output"] for piece in pieces) == answer["text_output"]
    assert len(pieces) > 1 and pieces[-1]["finish_reason"] == wanted.finish_reason


GUIDES: dict[str, tuple[str, Any]] = {
    "json": ("json", {"type": "object"}),
    "json_schema": (
        "json",
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    ),
    "regex": ("regex", "[a-z_]{6,12} = [0-9]{1,4}"),
    "ebnf_grammar": ("grammar", 'start: "def " NAME "():"\nNAME: /[a-z]{3,9}/'),
    "choice": ("choice", ["import os", "import sys"]),
}


@pytest.mark.slow
def test_penalties_log_probabilities_and_guides_are_those_of_generate(
    triton_python: Path, server: TritonServer, llm: LLM
) -> None:
    prompt = "import os\n"
    requests = []
    expected = []
    for number, (kind, (own, value)) in enumerate([*GUIDES.items(), ("", ("", ""))]):
        sampling = Sampling(
            temperature=0.7 * (number % 2),
            seed=number,
            presence_penalty=0.5,
            frequency_penalty=-0.25,
        )
        inputs: dict[str, Any] = {
            "text_input": prompt,
            "max_tokens": 40,
            "return_log_probs": True,
            "stream": number % 3 > 0,
            "temperature": sampling.temperature,
            "seed": number,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.25,
            "guided_decoding_guide_type": kind,
            "guided_decoding_guide": value if isinstance(value, str) else json.dumps(value),
        }
        if kind in ("", "json"):  # clients of other servers send empty guides
            inputs["guided_decoding_guide"] = ""
        requests.append({"inputs": inputs})
        constraint = make_constraint(own, value, llm) if own else None
        expected.append(
            llm.generate(prompt, sampling, max_new_tokens=40, logprobs=0, constraint=constraint)
        )
    for answers, wanted in zip(
        Client(triton_python, server, requests).all(), expected, strict=True
    ):
        assert "error" not in answers[0], answers
        assert (ids(answers), answers[-1]["reason"]) == (wanted.tokens, wanted.finish_reason)
        logprobs = [one.logprob for one in wanted.logprobs or ()]
        assert [value for answer in answers for value in answer["logprobs"]] == pytest.approx(
            logprobs, abs=1e-5
        )
        assert answers[-1]["total"] == pytest.approx(sum(one or 0 for one in logprobs), abs=1e-4)
    free = {"text_input": prompt, "max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    drawn = Client(triton_python, server, [{"inputs": free}] * 4).all()
    assert len({tuple(ids(answers)) for answers in drawn}) > 1  # without a seed each draws one
    assert "logprobs" not in drawn[0][0]  # nobody asked


@pytest.mark.slow
def test_a_guide_that_cannot_be_used_is_refused(triton_python: Path, server: TritonServer) -> None:
    guides = [
        ("", "[a-z]", "guided_decoding_guide_type is ''"),
        ("xml", "<a/>", "give one of json, json_schema"),
        ("regex", "", "guided_decoding_guide is missing"),
        ("regex", "(", "unclosed group"),
        ("json_schema", "{", "guided_decoding_guide"),
        ("choice", "3", "must be a list of texts"),
        ("regex", TOO_MUCH, "too expensive"),
    ]
    common = {"text_input": "x", "max_tokens": 400}
    requests = [
        {"inputs": common | {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}}
        for kind, guide, _ in guides
    ]
    for answers, (*_, words) in zip(
        Client(triton_python, server, requests).all(), guides, strict=True
    ):
        assert words in answers[-1]["error"], answers


@pytest.mark.slow
def test_a_message_can_open_no_turn(server: TritonServer, bundled: Path, tmp_path: Path) -> None:
    plain = load(with_turns(bundled, tmp_path / "plans"), threads=1, plain_content=True)
    body = {"messages": json.dumps(FORGED), "max_tokens": 12, "exclude_input_in_output": False}
    answer = json.loads(server.post("/v2/models/eesd/generate", json.dumps(body).encode()))
    wanted = plain.generate(FORGED, max_new_tokens=12)
    assert answer["output_ids"] == wanted.tokens and plain.encode(FORGED).count(0) == 1
    assert answer["text_output"] == plain.codec.decode(plain.encode(FORGED)) + wanted.text


@pytest.mark.slow
def test_bad_requests_are_answered_in_one_sentence(
    triton_python: Path, server: TritonServer
) -> None:
    bad = [
        ({"text_input": "x", "temperature": -1.0}, "temperature is -1.0"),
        ({"text_input": "x", "top_p": 0.0}, "top_p is 0.0"),
        ({"text_input": "x", "max_tokens": 0}, "max_new_tokens is 0"),
        ({"text_input": "x", "seed": 1, "random_seed": 2}, "seed and random_seed differ"),
        ({"text_input": "x", "seed": 2**64 - 1}, "seed is"),
        ({"text_input": "x", "input_ids": [1]}, "exactly one of text_input, messages"),
        ({"stream": True}, "exactly one of text_input, messages"),
        ({"messages": "[1]"}, "not a list of JSON objects"),
        ({"messages": "{"}, "messages"),
        ({"input_ids": [1 << 30]}, "token"),
        ({"input_ids": [1] * 5000}, "5000 tokens"),
    ]
    found = Client(triton_python, server, [{"inputs": inputs} for inputs, _ in bad]).all()
    for (answer,), (_, words) in zip(found, bad, strict=True):
        assert words in answer["error"] and answer["error"].endswith("."), answer
        assert answer["error"].count(". ") == 0 and "Traceback" not in answer["error"], answer


@pytest.mark.slow
def test_a_stream_that_is_cancelled_leaves_the_batch(
    triton_python: Path, server: TritonServer
) -> None:
    before = metric(server, "vllm:request_success_total")
    inputs = {"text_input": "import os\n", "max_tokens": LONG, "stream": True, "ignore_eos": True}
    (answers,) = Client(triton_python, server, [{"inputs": inputs, "cancel_after": 3}]).all()
    assert answers[-1]["cancelled"]
    ended = "vllm:request_success_total"
    eventually(
        lambda: metric(server, ended) > before and not metric(server, "vllm:num_requests_running")
    )
    assert 'finished_reason="abort"' in server.get("/metrics", server.metrics)


@pytest.mark.slow
def test_a_killed_stub_answers_again_after_a_reload(
    triton_python: Path, bundled: Path, tmp_path: Path, llm: LLM
) -> None:
    """Sometimes a restart is needed, because Triton may end together with its stub. Then the
    clients' streams break."""
    write_triton_repository(bundled, tmp_path / "models", threads=1)
    with triton_server(triton_python, tmp_path / "models", tmp_path) as server:
        # There are so many requests that none is complete when the stub is killed, because together
        # they take a long time on every processor.
        client = Client(triton_python, server, [{"inputs": RUNNING}] * 16, seconds=3)
        assert client.next()
        (stub,) = server.stubs()
        os.kill(stub, signal.SIGKILL)
        errors = {answers[-1]["error"] for answers in client.all()}
        if server.process.poll() is None:
            # Triton reports this only to clients whose request still waited for the stub, so all
            # clients need a time limit.
            assert {error for error in errors if "is not healthy" not in error} == {"timeout"}, (
                server.log.read_text()
            )
            reload_killed(triton_python, server)
            assert_answers(triton_python, server, llm)
            return
    assert "" not in errors
    with triton_server(triton_python, tmp_path / "models", tmp_path / "again") as server:
        assert_answers(triton_python, server, llm)


def reload_killed(python: Path, server: TritonServer) -> None:
    """Load the model again after the server has detected that its stub is gone."""

    def is_refused() -> bool:
        (answers,) = Client(python, server, [{"inputs": RUNNING}], seconds=3).all()
        return "not healthy" in answers[0]["error"]  # requests time out until the server detects it

    eventually(is_refused, 60)
    ready = "/v2/models/eesd/ready"
    assert server.ready(ready)  # so a probe must generate a token
    server.post("/v2/repository/models/eesd/unload", b"{}")
    eventually(lambda: not server.ready(ready))
    server.post("/v2/repository/models/eesd/load", b"{}")
    eventually(lambda: server.ready(ready))


def assert_answers(python: Path, server: TritonServer, llm: LLM) -> None:
    (again,) = Client(python, server, [{"inputs": RUNNING | {"max_tokens": 20}}]).all()
    assert ids(again) == llm.generate("import os\n", max_new_tokens=20, ignore_eos=True).tokens


@pytest.mark.slow
def test_nothing_outlives_a_server_that_was_killed(
    triton_python: Path, bundled: Path, tmp_path: Path
) -> None:
    write_triton_repository(bundled, tmp_path / "models", threads=1)
    with triton_server(triton_python, tmp_path / "models", tmp_path) as server:
        assert len(server.stubs()) == 1 and server.shared_memory()
        server.process.kill()
        eventually(lambda: not server.stubs())
        assert not server.shared_memory()
