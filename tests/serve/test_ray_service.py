"""Requests that run in replicas that die: each token comes once, and nothing hangs. Real batches,
without Ray."""

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from support.bundled import prompts, with_turns
from support.constrained import TOO_MUCH
from support.serving import Held

from eesd.common.errors import EESDError
from eesd.runtime.batch.scheduler import BatchOptions
from eesd.runtime.batch.service import Service
from eesd.runtime.constraint import make_constraint as constraint
from eesd.runtime.constraint import of_grammar
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import LLM, load
from eesd.runtime.request import QueueFullError, Request, Update
from eesd.serve.app import make_app
from eesd.serve.cli import LOOPBACK
from eesd.serve.http.options import ServeOptions
from eesd.serve.ray.options import read_options
from eesd.serve.ray.service import ATTEMPTS, RemoteService, Stream

SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=5)]


class Died(Exception):
    """A replica is gone."""


@pytest.fixture(scope="module")
def service(bundled: Path) -> Iterator[Service]:
    service = Service(load(bundled, threads=1))
    yield service
    service.close()


@pytest.fixture(scope="module")
def llm(bundled: Path) -> LLM:
    return load(bundled, threads=1)


def replicas(service: Service, deaths: list[int]) -> Stream:
    """Replicas of which each dies after so many updates of a request; those behind the list
    live."""
    left: dict[tuple[int, ...], Iterator[int]] = {}

    async def stream(request: Request, grammar: str | None) -> AsyncGenerator[Update, None]:
        request = pickle.loads(pickle.dumps(request))
        if grammar is not None:
            request = replace(request, constraint=of_grammar(grammar, service.llm))
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update]()
        generation = service.submit(request, lambda update: _put(loop, updates, update))
        count, last = 0, next(left.setdefault(tuple(request.tokens), iter(deaths)), -1)
        try:
            while count != last:
                yield (update := await updates.get())
                count += 1
                if update.finish_reason:
                    return
            raise Died
        finally:
            generation.cancel()

    return stream


def _put(loop: asyncio.AbstractEventLoop, updates: "asyncio.Queue[Update]", update: Update) -> None:
    with suppress(RuntimeError):  # the test has ended
        loop.call_soon_threadsafe(updates.put_nowait, update)


def run(
    remote: Callable[[], RemoteService],
    *requests: Request,
    then: Callable[[int, Any], None] = lambda *_: None,
) -> list[list[Update]]:
    """The updates of requests that run at once. ``then`` gets the number and the generation of each
    that has one."""

    async def main() -> list[list[Update]]:
        service = remote()
        found: list[list[Update]] = [[] for _ in requests]
        ended = [asyncio.Event() for _ in requests]
        generations: list[Any] = []

        def see(number: int, update: Update) -> None:
            found[number].append(update)
            then(number, generations[number])
            if update.finish_reason:
                ended[number].set()

        for number, request in enumerate(requests):
            generations.append(
                service.submit(request, lambda update, number=number: see(number, update))  # type: ignore[misc]
            )
        async with asyncio.timeout(60):
            for event in ended:
                await event.wait()
        return found

    return asyncio.run(main())


def tokens(updates: list[Update]) -> list[int]:
    return [output.token for update in updates for output in update.tokens]


@pytest.mark.parametrize("sampling", [*SAMPLINGS, Sampling(temperature=0.8)])
@pytest.mark.parametrize("deaths", [[], [0], [1], [5, 3]])
def test_a_replica_that_dies_costs_no_token_and_repeats_none(
    bundled: Path, service: Service, llm: LLM, sampling: Sampling, deaths: list[int]
) -> None:
    texts = prompts()[:4]
    requests = [
        Request(tokens=llm.encode(text), sampling=sampling, max_new_tokens=40, logprobs=0)
        for text in texts
    ]
    # A seed that the request drew is the same in every replica.
    wanted = [
        llm.generate(text, request.sampling, max_new_tokens=40)
        for text, request in zip(texts, requests, strict=True)
    ]
    found = run(lambda: RemoteService(bundled, replicas(service, deaths), (Died,), 8), *requests)
    for updates, completion in zip(found, wanted, strict=True):
        assert tokens(updates) == completion.tokens
        assert (
            "".join(output.text for update in updates for output in update.tokens)
            + updates[-1].held
            == completion.text
        )
        assert [update.finish_reason for update in updates] == [None] * (len(updates) - 1) + [
            completion.finish_reason
        ]
        assert updates[-1].stats.new_tokens == len(completion.tokens)
        # Metrics count what was added.
        for before, now in pairwise(update.stats for update in updates):
            assert (
                before.draft_tokens <= now.draft_tokens
                and before.accepted_tokens <= now.accepted_tokens
            )


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("deaths", [[], [3, 0, 1]])
def test_a_constraint_holds_in_every_replica(
    bundled: Path, service: Service, llm: LLM, sampling: Sampling, deaths: list[int]
) -> None:
    def asked() -> list[Request]:
        made = [
            constraint("regex", "([a-z]{1,8} ){9}end", llm),
            constraint("json", {"type": "array", "minItems": 9}, llm),
        ]
        return [
            Request(tokens=llm.encode("x = "), sampling=sampling, max_new_tokens=40, constraint=one)
            for one in made
        ]

    wanted = [service.generate(request) for request in asked()]
    found = run(lambda: RemoteService(bundled, replicas(service, deaths), (Died,), 8), *asked())
    for updates, completion in zip(found, wanted, strict=True):
        assert (
            tokens(updates) == completion.tokens
            and updates[-1].finish_reason == completion.finish_reason
        )


def test_a_constraint_that_fails_in_a_replica_says_so(
    bundled: Path, service: Service, llm: LLM
) -> None:
    request = Request(
        tokens=llm.encode("x"), max_new_tokens=400, constraint=constraint("regex", TOO_MUCH, llm)
    )
    (updates,) = run(lambda: RemoteService(bundled, replicas(service, []), (Died,), 8), request)
    assert updates[-1].refused and "takes too much" in str(updates[-1].error)


def test_what_cannot_be_repeated_ends_in_one_sentence(
    bundled: Path, service: Service, llm: LLM
) -> None:
    request = Request(
        tokens=llm.encode("import os\n"),
        sampling=Sampling(temperature=1.0, method="rejection"),
        max_new_tokens=60,
    )
    (updates,) = run(lambda: RemoteService(bundled, replicas(service, [2]), (Died,), 8), request)
    assert (
        tokens(updates)
        and updates[-1].finish_reason == "error"
        and "cannot be repeated" in str(updates[-1].error)
    )
    (updates,) = run(lambda: RemoteService(bundled, replicas(service, [0]), (Died,), 8), request)
    assert updates[-1].finish_reason in ("stop", "length")  # nothing was sent yet


def test_a_request_that_kills_every_replica_is_given_up(
    bundled: Path, service: Service, llm: LLM
) -> None:
    request = Request(tokens=llm.encode("import os\n"), max_new_tokens=60)
    (updates,) = run(
        lambda: RemoteService(bundled, replicas(service, [1] * ATTEMPTS), (Died,), 8), request
    )
    assert updates[-1].finish_reason == "error" and f"{ATTEMPTS} times" in str(updates[-1].error)


def test_what_a_replica_refuses_or_breaks_on_is_told(bundled: Path, llm: LLM) -> None:
    async def refuse(request: Request, _: str | None) -> AsyncGenerator[Update, None]:
        if request.max_new_tokens == 1:
            raise EESDError("This cannot be.")
        raise KeyError("internal detail")
        yield

    asked = [Request(tokens=llm.encode("x"), max_new_tokens=count) for count in (1, 2)]
    (refused,), (broken,) = run(lambda: RemoteService(bundled, refuse, (Died,), 8), *asked)
    assert (refused.finish_reason, refused.error) == ("error", "This cannot be.")
    assert broken.finish_reason == "error" and "internal detail" not in str(broken.error)


def test_cancelling_reaches_the_replica(bundled: Path, service: Service, llm: LLM) -> None:
    request = Request(tokens=llm.encode("import os\n"), max_new_tokens=900, ignore_eos=True)
    (updates,) = run(
        lambda: RemoteService(bundled, replicas(service, []), (Died,), 8),
        request,
        then=lambda _, generation: generation.cancel(),
    )
    assert updates[-1].finish_reason == "cancelled" and len(tokens(updates)) < 900
    service.generate(Request(tokens=llm.encode("x"), max_new_tokens=1))  # a round later
    assert service.load().running == 0


def test_bad_requests_and_too_many_are_refused_at_once(
    bundled: Path, service: Service, llm: LLM
) -> None:
    async def main() -> None:
        remote = RemoteService(bundled, replicas(service, []), (Died,), 1)
        for prompt, words in (([], "empty"), ([1 << 30], "token id"), ([1] * 5000, "5000 tokens")):
            with pytest.raises(EESDError, match=words):
                remote.submit(Request(tokens=prompt), lambda _: None)
        with pytest.raises(EESDError, match="cannot be sent"):
            remote.submit(Request(tokens=llm.encode("x"), constraint=Held()), lambda _: None)
        first = Request(tokens=llm.encode("x"), max_new_tokens=900, ignore_eos=True)
        remote.submit(first, lambda _: None)
        with pytest.raises(QueueFullError, match="try again"):
            remote.submit(first, lambda _: None)
        assert remote.load().running == 1
        remote.close()
        assert not remote.alive

    asyncio.run(main())


def test_options_are_those_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("a-secret-key\n")
    arguments = {
        "engine_dir": "plans",
        "num_cpus": "2.5",
        "max_rows": 3,
        "kv_memory": "1000000",
        "prefix_memory": 0,
        "kv_cache_dtype": "float16",
        "activations": "float32",
        "drafter": "text",
        "generation_config": "none",
        "api_key_file": str(tmp_path / "keys"),
        "allowed_host": ["Api.example.com"],
        "allowed_origin": "https://a.example *",
        "max_n": "5",
        "request_timeout": "7",
        "metrics_open": "true",
        "model_name": "one two",
        "no_guard": True,
    }
    environment = {
        "EESD_SERVE_MAX_N": "9",
        "EESD_SERVE_MAX_PROMPT_TOKENS": "11",
        "EESD_SERVE_MAX_REPLICAS": "6",
        "HOME": "/",
    }
    found = read_options(arguments, environment)
    assert (found.engine_dir, found.scale.max_replicas, found.scale.num_cpus) == (
        Path("plans"),
        6,
        2.5,
    )
    assert (
        found.batch.max_rows,
        found.batch.max_queue,
        found.batch.kv_memory,
        found.batch.prefix_memory,
    ) == (3, 3, 1000000, 0)
    assert (found.speculation.drafter, found.speculation.guard) == ("text", False)
    assert {
        name: found.engine[name]
        for name in ("threads", "kv_cache_dtype", "activations", "generation_config")
    } == {
        "threads": 2,
        "kv_cache_dtype": "float16",
        "activations": "float32",
        "generation_config": "none",
    }
    assert found.limits == ServeOptions(
        model_name="one",
        aliases=("two",),
        api_keys=("a-secret-key",),
        allowed_hosts=("Api.example.com", *LOOPBACK),
        allowed_origins=("https://a.example", "*"),
        metrics_open=True,
        max_prompt_tokens=11,
        max_n=5,
        request_timeout=7,
    )
    assert "a-secret-key" not in repr(found)
    monkeypatch.setenv("EESD_API_KEY", "another-secret-key")
    plain = read_options({}, {"EESD_SERVE_ENGINE_DIR": "plans"}).limits
    assert plain == ServeOptions(api_keys=("another-secret-key",))  # as eesd-serve reads it


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ({}, {}, "no engine directory"),
        ({"engine_dir": ""}, {}, "engine_dir is ''.*empty"),
        ({"engine_dir": "x", "max_row": 3}, {}, "no argument 'max_row'.*max_rows"),
        ({"engine_dir": "x", "port": 3}, {}, "no argument 'port'"),
        ({"engine_dir": "x"}, {"EESD_SERVE_PORT": "3"}, "EESD_SERVE_PORT names no option on Ray"),
        ({"engine_dir": "x", "max_rows": "many"}, {}, "max_rows is 'many'.*not a valid integer"),
        ({"engine_dir": "x", "num_cpus": -1}, {}, "num_cpus is -1"),
        ({"engine_dir": "x", "min_replicas": 3, "max_replicas": 2}, {}, "max_replicas is 2"),
        ({"engine_dir": "x", "kv_cache_dtype": "int3"}, {}, "kv_cache_dtype is 'int3'.*float16"),
        ({"engine_dir": "x", "kv_memory": 0}, {}, "kv_memory is 0"),
        ({"engine_dir": "x", "allowed_host": "a:1"}, {}, "allowed host 'a:1'"),
        ({"engine_dir": "x", "plain_content": "perhaps"}, {}, "plain_content is 'perhaps'"),
        ({"engine_dir": "x", "request_timeout": "nan"}, {}, "request_timeout"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    arguments: Any, environment: Any, words: str
) -> None:
    with pytest.raises(EESDError, match=words) as refused:
        read_options(arguments, environment)
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)


def test_the_page_names_all_arguments() -> None:
    with pytest.raises(EESDError, match="the arguments are") as refused:
        read_options({"nothing": 1}, {})
    page = (Path(__file__).parent.parent.parent / "docs" / "ray.md").read_text()
    names = str(refused.value).partition("the arguments are ")[2].rstrip(".").split(", ")
    assert len(names) > 20 and [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_text_is_as_long_as_a_replica_has_memory_for(
    bundled: Path, tmp_path: Path, path: str
) -> None:
    """Without a limit it is clipped, as eesd-serve does it; with a limit that is too high it is
    refused."""
    plans = with_turns(bundled, tmp_path / "plans")
    service = Service(load(plans, threads=1), BatchOptions(kv_memory=4 << 20))
    assert service.longest < service.llm.manifest.max_seq_len
    chat = path == "/v1/chat/completions"
    body = {
        "messages" if chat else "input": [{"role": "user", "content": "x"}],
        "temperature": 0,
        "ignore_eos": True,
    }

    async def main() -> tuple[httpx2.Response, httpx2.Response]:
        remote = RemoteService(plans, replicas(service, []), (Died,), 8, service.longest)
        transport = httpx2.ASGITransport(make_app(cast(Service, remote), ServeOptions()))
        async with httpx2.AsyncClient(transport=transport, base_url="http://replica") as http:
            limited = body | {"max_tokens" if chat else "max_output_tokens": 900}
            return await http.post(path, json=body), await http.post(path, json=limited)

    try:
        clipped, refused = asyncio.run(main())
    finally:
        service.close()
    assert refused.status_code == 400 and "there is memory for" in refused.text, refused.text
    assert clipped.status_code == 200, clipped.text
    assert clipped.json()["usage"]["total_tokens"] == service.longest
