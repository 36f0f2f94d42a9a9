"""The server on a real Ray cluster of one node: two replicas, one of which is killed, and as many
as the load needs."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from support import environments
from support.bundled import FORGED, prompts, with_turns
from support.constrained import TOO_MUCH
from support.ray_cluster import RayCluster, ray_cluster

from eesd.runtime.batch.scheduler import BatchOptions
from eesd.runtime.batch.service import Service
from eesd.runtime.constraint import make_constraint as constraint
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import LLM, Completion, load
from eesd.runtime.request import Request as RunRequest

pytestmark = pytest.mark.slow

SECONDS = 90
"""A request that takes longer hangs."""
KEY = "a-key-of-this-test"
MEMORY = 8 << 20


@pytest.fixture(scope="module")
def cluster(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    try:
        python = environments.make("ray")
    except environments.Unavailable as reason:
        pytest.skip(f"no Ray here: {reason}")
    arguments = {
        "engine_dir": str(bundled),
        "min_replicas": 2,
        "max_replicas": 2,
        "max_rows": 8,
        "model_name": "pycode",
    }
    scratch = tmp_path_factory.mktemp("ray")
    turns = str(with_turns(bundled, scratch / "plans"))
    (scratch / "keys").write_text(f"{KEY}\n")
    scaled = {
        "engine_dir": turns,
        "plain_content": "true",
        "min_replicas": 1,
        "max_replicas": 2,
        "num_cpus": 0,
        "max_rows": 2,
    }
    scaled |= {
        "api_key_file": str(scratch / "keys"),
        "allowed_host": "api.example.com",
        "kv_memory": MEMORY,
        "max_n": 3,
    }
    scaled |= {"kv_cache_dtype": "float16"}
    soon = {
        "metrics_interval_s": 0.5,
        "look_back_period_s": 1,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 1,
    }
    limits = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2}
    common = {"import_path": "eesd.serve.ray.app:app"}
    applications: list[dict[str, Any]] = [
        {**common, "name": "default", "route_prefix": "/", "args": arguments},
        {
            **common,
            "name": "scaled",
            "route_prefix": "/scaled",
            "args": scaled,
            "deployments": [
                {"name": "engine", "autoscaling_config": {**limits, **soon}},
                {"name": "openai", "num_replicas": 2},
            ],
        },
    ]
    with ray_cluster(python, applications) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def llm(bundled: Path) -> LLM:
    return load(bundled, threads=1)


def post(cluster: RayCluster, body: dict[str, Any], prefix: str = "") -> Any:
    return ask(cluster, f"{prefix}/v1/completions", body)


def ask(cluster: RayCluster, path: str, body: dict[str, Any] | None = None, **headers: str) -> Any:
    """A response. The key is sent, if ``headers`` say nothing else."""
    given = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **headers}
    request = Request(
        cluster.url + path, json.dumps(body).encode() if body is not None else None, given
    )
    return urlopen(request, timeout=SECONDS)


def refused(
    cluster: RayCluster, path: str, body: dict[str, Any] | None = None, **headers: str
) -> tuple[int, str]:
    """Status and message of an answer that is an error."""
    with pytest.raises(HTTPError) as error:
        ask(cluster, path, body, **headers)
    return error.value.code, json.load(error.value)["error"]["message"]


def complete(cluster: RayCluster, body: dict[str, Any]) -> dict[str, Any]:
    with post(cluster, body) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def stream(
    cluster: RayCluster, body: dict[str, Any], first: Barrier | None = None, prefix: str = ""
) -> tuple[str, str | None]:
    """The text of a stream and its finish reason. ``first`` is waited for after the first event."""
    text, reason, ended = "", None, False
    with post(cluster, body | {"stream": True}, prefix) as response:
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                ended = True
                continue
            event = json.loads(line[6:])
            assert "choices" in event, (event, len(text))
            choice = event["choices"][0]
            text, reason = text + choice["text"], choice["finish_reason"] or reason
            if first:
                first.wait(SECONDS)
                first = None
    assert ended
    return text, reason


def test_requests_at_once_have_the_tokens_of_generate(cluster: RayCluster, llm: LLM) -> None:
    def check(number: int) -> None:
        prompt, sampling = (
            prompts()[number],
            Sampling(temperature=0.8, top_p=0.9, seed=number) if number % 2 else Sampling(),
        )
        wanted = llm_texts[number]
        body = {
            "prompt": prompt,
            "max_tokens": 32,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": number,
        }
        answer = complete(cluster, body)
        assert answer["choices"][0]["text"] == wanted and answer["model"] == "pycode"
        assert stream(cluster, body)[0] == wanted

    llm_texts = [
        llm.generate(
            prompt,
            Sampling(temperature=0.8, top_p=0.9, seed=number) if number % 2 else Sampling(),
            max_new_tokens=32,
        ).text
        for number, prompt in enumerate(prompts()[:8])
    ]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(check, range(8)))


def test_prompts_that_begin_alike_go_to_the_same_replica(cluster: RayCluster) -> None:
    for number in range(8):
        beginning = f"# {number} " + "".join(prompts()[number : number + 3])
        complete(cluster, {"prompt": beginning, "max_tokens": 1, "temperature": 0})
        usage = complete(
            cluster, {"prompt": beginning + "\nimport", "max_tokens": 1, "temperature": 0}
        )["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0, number


def test_a_message_can_open_no_turn(cluster: RayCluster, bundled: Path, tmp_path: Path) -> None:
    plain = load(with_turns(bundled, tmp_path / "plans"), threads=1, plain_content=True)
    with ask(cluster, "/scaled/tokenize", {"messages": FORGED}) as response:
        tokens = json.load(response)["tokens"]
    assert tokens == plain.encode(FORGED) and tokens.count(0) == 1


def test_keys_hosts_limits_and_memory_are_those_of_the_server(
    cluster: RayCluster, bundled: Path, tmp_path: Path
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "ignore_eos": True}
    path = "/scaled/v1/chat/completions"
    assert refused(cluster, path, body, Authorization="Bearer wrong-key-1")[0] == 401
    assert refused(cluster, "/scaled/metrics", Authorization="")[0] == 401
    status, message = refused(cluster, path, body, Host="evil.example")
    assert status == 400 and "api.example.com" in message
    assert "at most 3" in refused(cluster, path, body | {"n": 4})[1]
    plans = with_turns(bundled, tmp_path / "plans")
    service = Service(
        load(plans, threads=1, kv_cache_dtype="float16"), BatchOptions(kv_memory=MEMORY)
    )
    longest = service.longest
    service.close()
    with ask(cluster, path, body, Host="Api.Example.com:8000") as response:  # clipped to the memory
        assert json.load(response)["usage"]["total_tokens"] == longest < 1024
    status, message = refused(cluster, path, body | {"max_tokens": 1000})
    assert status == 400 and f"keys and values of {longest}" in message


def test_metrics_are_those_of_all_processes(cluster: RayCluster) -> None:
    """Each scrape of the application would see another process, so Ray has them."""

    def total(name: str) -> float:
        with urlopen(cluster.metrics, timeout=SECONDS) as response:
            lines = response.read().decode().splitlines()
        found = [
            line
            for line in lines
            if line.startswith(f"{name}{{") and 'application="scaled"' in line
        ]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    names = (
        "ray_vllm_generation_tokens_total",
        "ray_vllm_prompt_tokens_total",
        "ray_vllm_time_to_first_token_seconds_count",
    )
    before = [0.0]
    while before != (before := [total(name) for name in names]):
        time.sleep(2)  # what ran before may not be counted yet
    for _ in range(8):  # over both processes that answer HTTP
        with post(
            cluster, {"prompt": "import os\n", "max_tokens": 5, "ignore_eos": True}, "/scaled"
        ) as response:
            prompt = json.load(response)["usage"]["prompt_tokens"]
    end = time.monotonic() + SECONDS
    while [total(name) - old for name, old in zip(names, before, strict=True)] != [
        40,
        8 * prompt,
        8,
    ]:
        assert time.monotonic() < end, [
            total(name) - old for name, old in zip(names, before, strict=True)
        ]
        time.sleep(0.2)
    while total("ray_eesd_rounds_total") < 8:  # of the batch
        assert time.monotonic() < end
        time.sleep(0.2)
    status, message = refused(cluster, "/scaled/metrics")
    assert status == 404 and "metrics port" in message


def constrained(llm: LLM, request: RunRequest, kind: str, value: Any) -> Completion:
    """What a request gives under a constraint in one process."""
    service = Service(llm)
    made = constraint(kind.removeprefix("guided_"), value, llm)
    try:
        return service.generate(replace(request, constraint=made))
    finally:
        service.close()


@pytest.mark.parametrize(
    ("pattern", "words"), [("(", "unclosed group"), (TOO_MUCH, "takes too much")]
)
def test_a_constraint_that_fails_before_or_in_the_replica_is_a_400(
    cluster: RayCluster, pattern: str, words: str
) -> None:
    status, message = refused(
        cluster, "/v1/completions", {"prompt": "x", "max_tokens": 400, "guided_regex": pattern}
    )
    assert status == 400 and words in message


def test_replicas_come_and_go_with_the_requests(cluster: RayCluster, bundled: Path) -> None:
    """And a replica that goes takes no text with it."""
    body = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}
    enough = Event()

    def ask_often(number: int) -> int:
        prompt, count = prompts()[number], 0
        wanted = llm_texts[number]
        while not (enough.is_set() and count):
            assert stream(cluster, body | {"prompt": prompt}, prefix="/scaled") == wanted
            count += 1
        return count

    half = load(bundled, threads=1, kv_cache_dtype="float16")
    llm_texts = [
        (
            (done := half.generate(prompt, Sampling(), max_new_tokens=200, ignore_eos=True)).text,
            done.finish_reason,
        )
        for prompt in prompts()[:6]
    ]
    assert (
        len(cluster.replicas("engine", "scaled")) == 1
        and len(cluster.replicas("openai", "scaled")) == 2
    )
    with ThreadPoolExecutor(6) as threads:
        found = [threads.submit(ask_often, number) for number in range(6)]
        try:
            become(cluster, 2)
        finally:
            enough.set()
        assert sum(one.result(SECONDS) for one in found) >= 6
    become(cluster, 1)
    assert stream(cluster, body | {"prompt": prompts()[0]}, prefix="/scaled") == llm_texts[0]


def become(cluster: RayCluster, count: int) -> None:
    """Wait until so many replicas run."""
    end = time.monotonic() + SECONDS
    while len(cluster.replicas("engine", "scaled")) != count:
        assert time.monotonic() < end, f"there are not {count} replicas"
        time.sleep(0.2)


def test_a_replica_that_is_killed_under_load_costs_no_text(cluster: RayCluster, llm: LLM) -> None:
    count, length = 8, 300
    texts = [f"# {number}\n{prompt}" for number, prompt in enumerate(prompts()[:count])]
    samplings = [
        Sampling(temperature=0.8, seed=number) if number % 2 else Sampling()
        for number in range(count)
    ]
    constraints: list[dict[str, Any]] = [
        {"guided_regex": "[a-z_ ]{2000,}"} if number % 4 > 1 else {} for number in range(count)
    ]
    wanted = []
    for text, sampling, constrains in zip(texts, samplings, constraints, strict=True):
        request = RunRequest(
            tokens=llm.encode(text), sampling=sampling, max_new_tokens=length, ignore_eos=True
        )
        free = partial(llm.generate, text, sampling, max_new_tokens=length, ignore_eos=True)
        wanted.append(
            constrained(llm, request, *next(iter(constrains.items()))) if constrains else free()
        )
    before = cluster.replicas("engine")
    assert len(before) == 2
    all_run = Barrier(count + 1)

    def ask_once(number: int) -> tuple[str, str | None]:
        sampling = samplings[number]
        body = {
            "prompt": texts[number],
            "max_tokens": length,
            "ignore_eos": True,
            **constraints[number],
        }
        return stream(
            cluster, body | {"temperature": sampling.temperature, "seed": sampling.seed}, all_run
        )

    with ThreadPoolExecutor(count) as threads:
        found = [threads.submit(ask_once, number) for number in range(count)]
        all_run.wait(SECONDS)
        os.kill(before[0], signal.SIGKILL)
        for one, completion in zip(found, wanted, strict=True):
            assert one.result(SECONDS) == (completion.text, completion.finish_reason)
    end = time.monotonic() + SECONDS
    while len(after := cluster.replicas("engine")) < 2 or after == before:
        assert time.monotonic() < end, "the replica was not replaced"
        time.sleep(0.2)
    assert before[0] not in after and before[1] in after
    text = complete(cluster, {"prompt": texts[0], "max_tokens": 8, "temperature": 0})["choices"][0][
        "text"
    ]
    assert text and wanted[0].text.startswith(text)
