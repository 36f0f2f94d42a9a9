"""Tests of the edge of the Python API. Any argument works, or raises an EESDError with one
sentence."""

import gc
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command import refused

import eesd
from eesd.common.errors import EESDError
from eesd.common.json_input import MAX_DEPTH
from eesd.runtime.chat_template import ChatTemplate
from eesd.runtime.llm import LLM, Speculation
from eesd.runtime.text import TextCodec

PROMPT = [1, 40, 50, 60]


@pytest.fixture(scope="module")
def llm(engine: Path) -> LLM:
    return eesd.load(engine)


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, 5, b"text", {"a": 1}, {1, 2}, [1.0], [True], [1, "a"], ["a"], [[1]], range, [[]]),
        *(np.array(5), np.ones((2, 2), np.int64)),
    ],
    ids=repr,
)
def test_a_prompt_of_another_type_is_refused(llm: LLM, prompt: Any) -> None:
    refused(
        lambda: llm.generate(prompt),
        "A prompt is a text, a list of token ids, or a list of chat messages",
    )


def test_prompts_of_numpy_integers_and_tuples_are_token_ids(llm: LLM) -> None:
    expected = llm.generate(PROMPT, max_new_tokens=4).tokens
    for prompt in (tuple(PROMPT), np.array(PROMPT), [np.int32(token) for token in PROMPT]):
        completion = llm.generate(prompt, max_new_tokens=np.int64(4))  # type: ignore[arg-type]
        assert completion.tokens == expected and all(
            type(token) is int for token in completion.tokens
        )


@pytest.mark.parametrize("prompt", [[], "", np.zeros(0, np.int64)], ids=repr)
def test_an_empty_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    """The tokenizer of the text model adds no tokens."""
    refused(lambda: llm.generate(prompt), "prompt is empty")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be an integer of at least 1"),
        ({"max_new_tokens": 1.0}, "max_new_tokens is 1.0"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_new_tokens": "8"}, "max_new_tokens is '8'"),
        ({"max_new_tokens": None}, "max_new_tokens is None"),
        ({"max_new_tokens": 2**80}, "max_new_tokens is 1208"),
        ({"stop": 5}, "stop is 5; it must be a string or a list of strings"),
        ({"stop": b"x"}, "stop is b'x'"),
        ({"stop": [5]}, "stop is [5]"),
        ({"stop": [""]}, "stop string is empty"),
        ({"stop": ""}, "stop string is empty"),
        ({"draft": 1}, "draft is 1; it must be True or False"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'"),
        (
            {"sampling": {"temperature": 1}},
            "sampling is {'temperature': 1}; it must be a Sampling or None",
        ),
        ({"constraint": 5}, "constraint is 5; give what eesd.make_constraint returns"),
        ({"constraint": "a+"}, "constraint is 'a+'"),
        ({"constraint": object()}, "constraint is <object"),
        ({"bogus": 1}, "There is no option 'bogus'; give some of max_new_tokens, stop"),
        ({"tokens": [1]}, "There is no option 'tokens'"),
        ({"logprobs": "5"}, "logprobs is '5'"),
        ({"seconds": "5"}, "seconds is '5'"),
        ({"min_tokens": 1.5}, "min_tokens is 1.5"),
    ],
)
def test_arguments_of_another_type_are_refused(
    llm: LLM, arguments: dict[str, Any], words: str
) -> None:
    refused(lambda: llm.generate(PROMPT, **arguments), words)


@pytest.mark.parametrize(
    "name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "method"]
)
@pytest.mark.parametrize(
    "value",
    [None, "1", True, [], float("nan"), float("inf"), -1, 10**400, 1j],
    ids=lambda v: repr(v)[:9],
)
def test_sampling_options_of_another_type_are_refused(name: str, value: Any) -> None:
    if (name, value) != ("seed", None):  # each request draws a seed
        refused(
            lambda: eesd.Sampling(**{name: value}), name if name != "method" else "sampling method"
        )


def test_texts_are_independent_without_a_seed_and_have_their_own_with_one(llm: LLM) -> None:
    hot = eesd.Sampling(temperature=3.0)
    for sampling in (hot, eesd.Sampling(temperature=3.0, method="rejection")):
        found = [
            tuple(llm.generate(PROMPT, sampling, max_new_tokens=12, ignore_eos=True).tokens)
            for _ in range(4)
        ]
        assert len(set(found)) == 4
    request = llm.request(PROMPT, hot, max_new_tokens=12, ignore_eos=True)
    assert (
        list(llm.run(request))[-1].stats.new_tokens == 12
        and len({*map(str, [tokens(llm, request) for _ in range(3)])}) == 1
    )
    seeded = eesd.Sampling(temperature=3.0, seed=7)
    seeds = [seeded.of_text(prompt, choice).seed for prompt in range(40) for choice in range(40)]
    assert (
        seeds[0] == 7
        and len(set(seeds)) == 1600
        and seeds
        == [seeded.of_text(prompt, choice).seed for prompt in range(40) for choice in range(40)]
    )
    other = eesd.Sampling(temperature=3.0, seed=8)
    assert not {*seeds} & {
        other.of_text(prompt, choice).seed for prompt in range(40) for choice in range(40)
    }
    assert eesd.Sampling().of_text(3, 4) == eesd.Sampling(), "greedy texts have no random numbers"


def tokens(llm: LLM, request: eesd.Request) -> list[int]:
    return [output.token for update in llm.run(request) for output in update.tokens]


def test_numbers_of_numpy_are_numbers() -> None:
    sampling = eesd.Sampling(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint8(7))  # type: ignore[arg-type]
    assert sampling.temperature == 0.5


HUGE = 10**5000
speculate: Any = Speculation
load: Any = eesd.load
"""These have the type ``Any``, because the tests call them with arguments that their types
forbid."""


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda _: speculate(controller=5), "controller is 5"),
        (lambda _: speculate(tree="1"), "tree is '1'"),
        (lambda _: speculate(tree=1.0), "tree is 1.0"),
        (lambda _: speculate(tree=-1), "tree is -1"),
        (lambda _: speculate(tree=HUGE), "tree is"),
        (lambda _: speculate(guard=1), "guard is 1"),
        (lambda _: speculate(seed=-1), "seed is -1"),
        (lambda _: eesd.Sampling(seed=2**64), "an integer between 0 and 9223372036854775807"),
        (lambda _: eesd.Sampling(seed=HUGE), "seed is"),
        (lambda llm: llm.with_speculation(5), "speculation is 5"),
        (lambda llm: llm.with_speculation("fixed:k=4"), "speculation is 'fixed:k=4'"),
        (lambda llm: llm.generate([HUGE]), "token id"),
        (lambda llm: llm.generate(PROMPT, max_new_tokens=HUGE), "max_new_tokens is"),
        (lambda _: load(5), "engine_dir is 5"),
        (lambda _: load(""), "engine_dir is ''"),
        (lambda _: load(None), "engine_dir is None"),
        (lambda _: load("a\0b"), "engine_dir is 'a"),
        (lambda _: load("\ud800"), "engine_dir is"),
        (lambda _: load(b"plans"), "engine_dir is b'plans'"),
        (lambda _: load("x" * 5000), "xxx"),
        (lambda llm: load(llm.directory, None), "backend"),
        (lambda llm: load(llm.directory, ["ort"]), "backend"),
        (lambda llm: load(llm.directory, speculation="fixed:k=4"), "speculation is 'fixed:k=4'"),
        (lambda llm: load(llm.directory, threads="2"), "threads is '2'"),
        (lambda llm: load(llm.directory, threads=1.5), "threads is 1.5"),
        (lambda llm: load(llm.directory, threads=True), "threads is True"),
        (lambda llm: load(llm.directory, threads=HUGE), "threads is"),
        (
            lambda llm: load(llm.directory, generation_config="vllm"),
            "'vllm'; it must be one of auto, none",
        ),
    ],
)
def test_odd_calls_are_refused(llm: LLM, call: Callable[[Any], object], words: str) -> None:
    refused(lambda: call(llm), words)


def test_a_service_refuses_arguments_of_another_type(llm: LLM) -> None:
    service: Any = eesd.Service(llm, eesd.BatchOptions(max_rows=2))
    refused(lambda: service.generate(5), "request is 5; it must be a Request")
    refused(lambda: service.submit(llm.request(PROMPT), 5), "on_update is 5; it must be a function")
    service.close()
    refused(lambda: [*llm.run(PROMPT)], ("request is [1, 40, 50, 60]; it must be a Request"))  # type: ignore[arg-type]
    broken: Any = eesd.Service
    refused(lambda: broken(5), "llm is 5; it must be an LLM")
    refused(lambda: broken(llm, 5), "options is 5; it must be BatchOptions")


def answers_of_threads(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """Returns the results of four threads that use one LLM at once, and the expected results. The
    threads use whole texts, streams, sessions and prefixes."""
    prompts = [[1 + number, 40, 50, 60] * 12 for number in range(4)]
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    expected = [llm.generate(prompt, **options).tokens for prompt in prompts]

    def driven(prompt: list[int]) -> list[int]:
        with llm.session(prompt, **options) as session:
            while session.finish_reason is None:
                session.peek()
                session.step()
        return session.tokens[len(prompt) :]

    ways: list[Callable[[list[int]], list[int]]] = [
        lambda prompt: llm.generate(prompt, **options).tokens,
        lambda prompt: [
            piece.token for piece in llm.stream(prompt, **options) if piece.token is not None
        ],
        driven,
        lambda prompt: llm.with_speculation(None).generate(prompt, **options).tokens,
    ]

    def ask(number: int) -> list[tuple[list[int], list[int]]]:
        return [(ways[(number + at) % 4](prompts[number]), expected[number]) for at in range(8)]

    with ThreadPoolExecutor(4) as pool:
        return [one for found in pool.map(ask, range(4)) for one in found]


@pytest.mark.parametrize(("backend", "beside"), [("ort", "served"), ("torch", "alone")])
def test_threads_of_one_llm_get_their_own_tokens(engine: Path, backend: str, beside: str) -> None:
    """A call waits for the rounds of other calls, including those of a service."""
    llm = eesd.load(engine, backend, threads=1, prefix_memory=1 << 20)
    service = eesd.Service(llm, eesd.BatchOptions(max_rows=2)) if beside == "served" else None
    request = llm.request([7, 8, 9], max_new_tokens=200, ignore_eos=True)
    with ThreadPoolExecutor(2) as pool:
        served = [pool.submit(service.generate, request) for _ in range(2)] if service else []
        for found, expected in answers_of_threads(llm):
            assert found == expected
        for one in served:
            assert (
                one.result().tokens
                == llm.generate([7, 8, 9], max_new_tokens=200, ignore_eos=True).tokens
            )
    if service:
        service.close()


def test_a_stream_that_a_thread_abandons_locks_nobody(llm: LLM) -> None:
    expected = llm.generate(PROMPT, max_new_tokens=8).tokens
    left: list[Any] = []

    def abandon() -> None:
        left.append(llm.stream(PROMPT, max_new_tokens=8))  # this stream is never closed
        next(left[0])
        next(llm.stream(PROMPT, max_new_tokens=8))  # and this stream is collected
        with llm.session(PROMPT) as session:
            session.step()
            raise KeyError

    with ThreadPoolExecutor(1) as pool:
        assert isinstance(pool.submit(abandon).exception(), KeyError)
    assert llm.generate(PROMPT, max_new_tokens=8).tokens == expected
    with ThreadPoolExecutor(1) as pool:  # another thread may end it
        assert [piece.token for piece in pool.submit(list, left[0]).result()] == expected[1:]


class Late(Exception):
    """Raised by the handler of an alarm."""


@pytest.mark.parametrize("raises", [Late, EESDError])
def test_an_exception_of_ones_own_signal_handler_stays_what_it_is(
    llm: LLM, raises: type[Exception]
) -> None:
    def ring(*_: object) -> None:
        raise raises("late")

    text = "to be or not " * 100_000
    before = signal.signal(signal.SIGALRM, ring)
    codec = TextCodec(llm.directory)  # without a limit
    message: Any = [{"role": "user", "content": "a"}]
    template = ChatTemplate(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", {}
    )
    # An exception in a callback of the garbage collector is ignored. Hypothesis has such a
    # callback.
    gc.disable()
    try:
        for call in (
            lambda: codec.encode(text),
            lambda: template.render(message),
            lambda: llm.generate(PROMPT, **ENDLESS),
        ):
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with pytest.raises(raises, match="late"):
                call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


ENDLESS: dict[str, Any] = {"max_new_tokens": 10**6, "ignore_eos": True}


def test_a_stop_string_is_one_string(llm: LLM) -> None:
    text = llm.generate(PROMPT, max_new_tokens=24).text
    stop = text[8:11]
    assert llm.generate(PROMPT, max_new_tokens=24, stop=stop).text == text[: text.index(stop)]
    assert llm.generate(PROMPT, max_new_tokens=24, stop=[stop]).text == text[: text.index(stop)]


def test_a_session_cannot_be_used_after_its_block(llm: LLM) -> None:
    """The cache of a closed session belongs to the next session, whose tokens would change."""
    with llm.session(PROMPT, max_new_tokens=32) as old:
        old.step()
    tokens = list(old.tokens)
    expected = llm.generate(PROMPT[:3], max_new_tokens=8).tokens
    with llm.session(PROMPT[:3], max_new_tokens=8) as new:
        for use in (old.step, old.prefill, old.peek, lambda: old.kv_cache):
            refused(use, "session is closed", "start a new session")
        while new.finish_reason is None:
            new.step()
    assert new.tokens[3:] == expected
    assert old.tokens == tokens and old.stats.rounds == 1 and old.finish_reason is None


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-40, 1e-9])
@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_a_tiny_temperature_is_greedy(llm: LLM, temperature: float, method: str) -> None:
    sampling = eesd.Sampling(
        temperature, seed=3, method=method, top_p=1e-320, min_p=5e-324, top_k=2**62
    )
    assert (
        llm.generate(PROMPT, sampling, max_new_tokens=16).tokens
        == llm.generate(PROMPT, max_new_tokens=16).tokens
    )


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(["role", "content"]), inner)
    ),
    max_leaves=8,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prompt=VALUES,
    stop=VALUES,
    name=st.sampled_from(["max_new_tokens", "draft", "ignore_eos", "sampling"]),
    value=VALUES,
)
def test_any_arguments_work_or_are_refused(
    llm: LLM, prompt: Any, stop: Any, name: str, value: Any
) -> None:
    for arguments in (
        {"prompt": prompt},
        {"prompt": PROMPT, "stop": stop},
        {"prompt": PROMPT, name: value},
    ):
        try:
            llm.generate(**{"max_new_tokens": 2} | arguments)
        except EESDError as error:
            assert "\n" not in str(error)


@settings(max_examples=300, deadline=None)
@given(values=st.dictionaries(st.sampled_from(list(eesd.Sampling.__annotations__)), VALUES))
def test_any_sampling_works_or_is_refused(values: dict[str, Any]) -> None:
    try:
        eesd.Sampling(**values)
    except EESDError as error:
        assert "\n" not in str(error)


def test_messages_nested_too_deeply_are_refused(llm: LLM) -> None:
    nested: Any = "x"
    for _ in range(50 * MAX_DEPTH):
        nested = [nested]
    with pytest.raises(EESDError):
        llm.generate([{"role": "user", "content": nested}])


EXTREMES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 5e-324, 1e-320, 1e-40, 0.01, 0.7, 5, 99.9]),
        "top_k": st.sampled_from([0, 1, 2, 50, 2**62]),
        "top_p": st.sampled_from([1, 1e-320, 1e-9, 0.5, 0.999999999]),
        "min_p": st.sampled_from([0, 5e-324, 0.1, 0.9999999999]),
        "repetition_penalty": st.sampled_from([1, 0.01, 1.1, 100]),
        "seed": st.integers(0, 2**63 - 1),
    }
)


@pytest.mark.filterwarnings("error")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(options=EXTREMES, width=st.sampled_from([0, 3]))
def test_extreme_sampling_options_are_lossless(
    llm: LLM, options: dict[str, Any], width: int
) -> None:
    """No value overflows or causes a warning, and no underflow changes tokens."""
    sampling = eesd.Sampling(**options)
    drafting = llm.with_speculation(Speculation("fixed:k=3", tree=width, guard=False))
    plain, drafted = (
        drafting.generate(PROMPT, sampling, max_new_tokens=16, ignore_eos=True, draft=d)
        for d in (False, True)
    )
    assert plain.tokens == drafted.tokens


def test_the_tokenizer_is_the_one_that_was_there_at_loading(
    engine_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later export to the same path has no effect, and neither has another working directory."""
    monkeypatch.chdir(engine_copy.parent)
    llm = eesd.load("plans")
    expected = llm.generate("to be", max_new_tokens=6)
    text = (engine_copy / "tokenizer.json").read_text()
    (engine_copy / "tokenizer.json").write_text(text.replace('"t"', '"\u00e9"'))
    assert llm.with_speculation(None).generate("to be", max_new_tokens=6).text == expected.text
    monkeypatch.chdir("/")
    assert llm.generate("to be", max_new_tokens=6).tokens == expected.tokens
    assert llm.generate([*llm.encode("to be")], max_new_tokens=6).text == expected.text


def test_a_pipe_in_place_of_a_file_is_refused(engine_copy: Path) -> None:
    """Nothing writes to the pipe, so reading would never end."""
    (engine_copy / "manifest.json").unlink()
    os.mkfifo(engine_copy / "manifest.json")
    refused(lambda: eesd.load(engine_copy), "manifest.json", "is not a file")
