"""Tests of ``/v1/completions``, which OpenAI's client calls. In every form of the answer, the
tokens equal the tokens of ``llm.generate``."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine_dirs import record
from support.serving import Served, events, served
from tokenizers import Tokenizer, decoders, models

from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import LLM, Completion
from eesd.runtime.request import TokenLogprob
from eesd.runtime.text import TextCodec
from eesd.serve.openai.logprobs import TokenWriter

PROMPT = "def f(x): return x"
COUNT = 24
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5}


def alone(
    server: Served, prompt: Any = PROMPT, sampling: Sampling | None = None, **more: Any
) -> Completion:
    return server.llm.generate(prompt, sampling, **{"max_new_tokens": COUNT, **more})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.9, seed=5), Sampling(1.1, 20, 0.9, 0.01, 1.2, 8)],
)
@pytest.mark.parametrize("draft", [True, False])
def test_the_tokens_are_those_of_generate(
    server: Served, sampling: Sampling, stream: bool, draft: bool
) -> None:
    more = {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
    }
    response: Any = server.openai.completions.create(
        model=server.serving.model_name,
        prompt=PROMPT,
        max_tokens=COUNT,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stream=stream,
        extra_body={**more, "return_token_ids": True, "draft": draft},
    )
    expected = alone(server, sampling=sampling)
    parts: Sequence[Any] = (
        [part.choices[0] for part in response] if stream else [response.choices[0]]
    )
    assert "".join(part.text for part in parts) == expected.text
    assert [token for part in parts for token in part.token_ids or ()] == expected.tokens
    assert [part.finish_reason for part in parts] == [
        *[None] * (len(parts) - 1),
        expected.finish_reason,
    ]
    assert parts[0].prompt_token_ids == server.llm.encode(PROMPT)


def test_fields_in_the_forms_of_other_servers(server: Served) -> None:
    def text(**more: Any) -> Any:
        return server.complete(PROMPT, temperature=0, **{"max_tokens": COUNT, **more})["choices"][
            0
        ]["text"]

    whole = text()
    bias = str(server.llm.encode("a")[0])
    assert text(stop="") == text(stop=[""]) == text(stop=["", "\x01"]) == whole
    assert (
        text(max_tokens=None, n_predict=COUNT)
        == text(max_tokens=None, max_new_tokens=COUNT)
        == whole
    )
    assert text(repeat_penalty=1.3) == text(repetition_penalty=1.3) != whole
    assert text(logit_bias=[[int(bias), 50]]) == text(logit_bias={bias: 50}) != whole
    assert text(logit_bias=[[int(bias), False]]) == text(logit_bias={bias: -100})
    assert text(max_tokens=-1) == text(max_tokens=None) and len(text(max_tokens=-1)) > len(whole)
    neutral = {
        "typical_p": 1.0,
        "mirostat": 0,
        "grammar": "",
        "options": None,
        "do_sample": True,
        "best_of": 1,
        "bad_words": [],
    }
    assert text(**neutral) == whole


@pytest.mark.parametrize("draft", [True, False])
def test_tokens_can_be_allowed_and_forbidden(server: Served, draft: bool) -> None:
    """A forbidden word appears neither at the beginning of the text nor after a space. Its first
    token may appear alone."""
    options: dict[str, Any] = {
        "max_tokens": 60,
        "temperature": 1.5,
        "seed": 3,
        "draft": draft,
        "ignore_eos": True,
    }

    def text(**more: Any) -> Any:
        return server.complete(PROMPT, **options, **more)["choices"][0]["text"]

    free = text()
    letter = free[5]
    pair = free[10:12]
    assert letter not in text(bad_words=[letter]) and pair not in text(bad_words=[pair])
    assert pair[0] in text(bad_words=[pair])
    ids = server.llm.encode("abc")
    assert set(text(allowed_token_ids=ids)) == set("abc")
    assert set(text(allowed_token_ids=ids, bad_words=["b"], guided_regex="[bcd]{99}")) == {"c"}
    none = server.post(
        "/v1/completions", {"prompt": "a", "allowed_token_ids": ids[:1], "bad_words": ["a"]}
    )
    assert none.status_code == 400 and "leave no token" in none.text


def test_a_text_between_two_others(engine_copy: Path) -> None:
    """The prompt uses the special tokens that code models have for this."""
    file = engine_copy / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for old, new in zip("`|^", ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), strict=True):
        vocabulary[new] = vocabulary.pop(old)
    file.write_text(json.dumps(tokenizer))
    record(engine_copy, "tokenizer.json")
    with served(engine_copy) as server:
        first, second, last = (
            vocabulary[name] for name in ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
        )
        prompt = [first, *server.llm.encode("a = "), second, *server.llm.encode("b"), last]
        found = server.complete(
            "a = ", suffix="b", max_tokens=8, temperature=0, return_token_ids=True
        )["choices"][0]
        assert (
            found["prompt_token_ids"] == prompt
            and found["text"] == server.llm.generate(prompt, max_new_tokens=8).text
        )
        assert (
            server.complete("a = ", suffix="", max_tokens=8, temperature=0)["choices"][0]["text"]
            != found["text"]
        )
        mark = {"logit_bias": {first: 100}, "temperature": 0, "max_tokens": 4}
        assert server.complete("a = ", suffix="b", **mark)["choices"][0]["finish_reason"] == "stop"
        going_on = server.complete("a = ", suffix="b", ignore_eos=True, **mark)["choices"][0]
        assert going_on["finish_reason"] == "length"


def test_parts_of_characters_stay_apart(tmp_path: Path) -> None:
    """Tokens and their alternatives have OpenAI's form."""
    names = ["<s>", "a", "\u00f0", "\u0141", "\u0142"]  # bytes of level GPT-2: F0, 9F, A0
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = TokenWriter(TextCodec(tmp_path)).completion(
        [TokenLogprob(2, -0.1, ((2, -0.1), (3, -3.0), (4, -4.0), (1, -5.0)))]
    )
    assert found.tokens == ["bytes:\\xf0"] and len(found.top_logprobs[0] or ()) == 4
    assert [*(found.top_logprobs[0] or ())][3] == "a"


def test_without_a_seed_texts_differ(server: Served) -> None:
    texts = {
        server.complete(PROMPT, max_tokens=COUNT, temperature=2.0)["choices"][0]["text"]
        for _ in range(3)
    }
    assert len(texts) == 3
    for asked in ({"prompt": [PROMPT] * 4}, {"prompt": [PROMPT] * 2, "n": 2}):
        choices = server.post(
            "/v1/completions", asked | {"max_tokens": COUNT, "temperature": 2.0}
        ).json()["choices"]
        assert len({choice["text"] for choice in choices}) == 4, (
            "prompts and choices of one request are independent, too"
        )


def test_prompts_of_every_form(server: Served) -> None:
    texts = [PROMPT, "import os"]
    ids = [server.llm.encode(text) for text in texts]
    expected = [alone(server, text).text for text in texts]
    for prompts, count in ((texts, 2), (ids, 2), (ids[0], 1), (texts[:1], 1)):
        found = server.complete(prompts, max_tokens=COUNT, temperature=0)
        assert [choice["text"] for choice in found["choices"]] == expected[:count]
    found = server.complete(texts, max_tokens=COUNT, n=2, **SAMPLED)
    own = [
        (text, Sampling(**SAMPLED).of_text(number, choice))
        for number, text in enumerate(texts)
        for choice in range(2)
    ]
    sampled = [alone(server, text, sampling) for text, sampling in own]
    assert [choice["text"] for choice in found["choices"]] == [one.text for one in sampled]
    new = sum(len(one.tokens) for one in sampled)
    assert (
        found["usage"]["prompt_tokens"] == sum(map(len, ids))
        and found["usage"]["completion_tokens"] == new
    )


def test_a_stop_string_that_is_a_special_token_stops_at_the_token(server: Served) -> None:
    """A special token has no text, so no stop string can be found in it."""
    options = {"logit_bias": {1: 100}, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    choice = server.complete(PROMPT, stop=["never", "<s>"], **options)["choices"][0]
    assert (choice["token_ids"], choice["text"]) == ([1], "")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "<s>")
    options["logit_bias"] = {2: 100}  # the EOS token
    choice = server.complete(PROMPT, stop="</s>", ignore_eos=True, **options)["choices"][0]
    assert (choice["token_ids"], choice["stop_reason"]) == ([2], "</s>")
    later = server.complete(PROMPT, stop="</s>", min_tokens=3, **options)["choices"][0]
    assert len(later["token_ids"]) == 4


def test_stop_strings_and_eos(server: Served) -> None:
    text = alone(server, ignore_eos=True).text
    stop = text[5:7]
    choice = server.complete(
        PROMPT, max_tokens=COUNT, temperature=0, ignore_eos=True, stop=["\x01no", stop]
    )["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    choice = server.complete(PROMPT, max_tokens=300, temperature=0, stop="\x01no")["choices"][0]
    assert choice["text"] == alone(server, max_new_tokens=300).text


def test_what_is_left_out_or_null_takes_the_defaults(server: Served) -> None:
    expected = alone(server, max_new_tokens=16).text
    assert server.complete(PROMPT)["choices"][0]["text"] == expected
    nulls = dict.fromkeys(
        ("stop", "seed", "n", "logprobs", "temperature", "stream", "logit_bias", "suffix", "user")
    )
    assert (
        server.complete(PROMPT, **nulls, something_new={"a": [1]}, top_k=-1)["choices"][0]["text"]
        == expected
    )
    whole = server.complete(PROMPT, max_tokens=None, ignore_eos=True)
    assert whole["usage"]["total_tokens"] >= server.serving.max_model_len - 1
    assert server.complete(PROMPT, max_tokens=10**9, ignore_eos=True)["choices"] == whole["choices"]


def test_min_tokens_keeps_a_text_going(server: Served) -> None:
    found = server.complete(PROMPT, max_tokens=400, min_tokens=400, return_token_ids=True)[
        "choices"
    ][0]
    assert len(found["token_ids"]) == 400 and found["finish_reason"] == "length"


@pytest.mark.parametrize("least", [1, 4, 7, 12])
@pytest.mark.parametrize("draft", [True, False])
def test_a_stop_string_ends_no_text_before_min_tokens(
    server: Served, least: int, draft: bool
) -> None:
    """As in vLLM, only a stop string that is complete after these tokens ends the text. The text
    before it is kept."""
    body = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True, "draft": draft}
    ids = server.complete(PROMPT, **body, return_token_ids=True)["choices"][0]["token_ids"]
    decode = server.llm.codec.decode
    text = decode(ids)

    def whole_with(letters: int) -> int:
        """Returns the number of tokens that add this many letters. Special tokens add no
        letters."""
        return next(count for count in range(COUNT + 1) if len(decode(ids[:count])) >= letters)

    for start in (0, 3, 6, 10):
        stop = text[start : start + 2]
        ends = [
            at
            for at in range(len(text))
            if text.startswith(stop, at) and whole_with(at + len(stop)) > least
        ]
        found = server.complete(PROMPT, **body, stop=stop, min_tokens=least)["choices"][0]
        assert found["text"] == text[: ends[0] if ends else None], (stop, text)
        assert found["finish_reason"] == ("stop" if ends else "length")


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    scores = logits.astype(np.float64) - logits.max()
    found: np.ndarray[Any, Any] = scores - np.log(np.exp(scores).sum())
    return found


def rows(llm: LLM, prompt: Sequence[int], count: int) -> list[np.ndarray[Any, Any]]:
    """Returns the model's log-probabilities after a prompt, and after each token of the prompt's
    greedy continuation."""
    found: list[np.ndarray[Any, Any]] = []
    llm.observer = lambda _, logits: found.extend(log_softmax(row) for row in np.array(logits))
    llm.generate(prompt, Sampling(), max_new_tokens=count, ignore_eos=True)
    llm.observer = None
    return found[:count]


def test_log_probabilities_are_those_of_the_model(server: Served) -> None:
    choice = server.complete(PROMPT, max_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=3)[
        "choices"
    ][0]
    expected = alone(server, sampling=Sampling(), ignore_eos=True)
    found = choice["logprobs"]
    reference = rows(server.llm, server.llm.encode(PROMPT), COUNT)
    assert np.allclose(
        found["token_logprobs"],
        [row[t] for row, t in zip(reference, expected.tokens, strict=True)],
        atol=1e-5,
    )
    for top, row in zip(found["top_logprobs"], reference, strict=True):
        assert (
            np.allclose(sorted(top.values()), np.sort(row)[-len(top) :], atol=1e-5)
            and len(top) == 3
        )
    assert (
        "".join(token for token in found["tokens"] if token not in ("<s>", "</s>", "<unk>"))
        == choice["text"]
    )
    places = zip(found["tokens"], found["text_offset"], strict=True)
    assert all(choice["text"][at:].startswith(token) for token, at in places if len(token) == 1)


def test_sampling_does_not_change_log_probabilities(server: Served) -> None:
    """The answer has the model's log-probabilities, before temperature and filters, as lm_eval and
    perplexities need them."""
    body = {"max_tokens": 1, "echo": True, "logprobs": 1}
    greedy, hot = (
        server.complete(PROMPT, temperature=t, seed=3, **body)["choices"][0]["logprobs"]
        for t in (0, 5)
    )
    assert greedy["token_logprobs"][:-1] == hot["token_logprobs"][:-1]


@pytest.mark.parametrize("most", [0, 1])
def test_echo_with_log_probabilities_scores_a_prompt(server: Served, most: int) -> None:
    """The answer has the log-probability of each prompt token except the first, as lm_eval
    requests."""
    ids = server.llm.encode("<s>" + PROMPT) if most else server.llm.encode(PROMPT)
    found = server.complete([ids], max_tokens=most, echo=True, logprobs=1, temperature=0)
    (choice,) = found["choices"]
    logprobs = choice["logprobs"]
    assert (
        len(logprobs["tokens"]) == len(ids) + most and found["usage"]["completion_tokens"] == most
    )
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    reference = [rows(server.llm, ids[:length], 1)[0] for length in range(1, len(ids))]
    wanted = [row[token] for row, token in zip(reference, ids[1:], strict=True)]
    assert np.allclose(logprobs["token_logprobs"][1 : len(ids)], wanted, atol=1e-5)
    for row, top, token in zip(reference, logprobs["top_logprobs"][1:], ids[1:], strict=False):
        assert np.isclose(max(top.values()), row.max(), atol=1e-5)
        assert (max(top.values()) in [top.get(server.llm.codec.tokenizer.id_to_token(token))]) == (
            row.argmax() == token
        )
    assert choice["text"] == server.llm.codec.decode(ids) + (
        alone(server, ids, max_new_tokens=1).text if most else ""
    )


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_stream_has_what_the_whole_answer_has(server: Served, logprobs: int | None) -> None:
    body = {
        "prompt": [PROMPT, "a"],
        "max_tokens": COUNT,
        "echo": True,
        "logprobs": logprobs,
        "n": 2,
        **SAMPLED,
    }
    whole = server.complete(body.pop("prompt"), **body)
    with server.http.stream(
        "POST", "/v1/completions", json={**body, "prompt": [PROMPT, "a"], "stream": True}
    ) as stream:
        *chunks, done = events(stream.iter_lines())
    assert (
        done == "[DONE]"
        and chunks[-1]["metrics"]
        and not any("metrics" in chunk for chunk in chunks[:-1])
    )
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        parts = [
            part
            for chunk in chunks
            for part in chunk["choices"]
            if part["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [
            choice["finish_reason"]
        ]
        if logprobs is not None:
            for name, values in choice["logprobs"].items():
                assert [value for part in parts for value in part["logprobs"][name]] == values


def test_requests_at_once_get_what_they_get_alone(server: Served) -> None:
    """Some requests are streamed, sampled or long, some are not, and some clients disconnect."""

    def one(number: int) -> None:
        prompt = PROMPT[: 3 + number % 12]
        most = 10 + 17 * (number % 5)
        sampling = Sampling(temperature=0.7 * (number % 3), seed=number)
        body = {
            "prompt": prompt,
            "max_tokens": most,
            "temperature": sampling.temperature,
            "seed": number,
        }
        if number % 4 == 3:
            with server.http.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as stream:
                next(stream.iter_lines())
            return
        if number % 4:
            with server.http.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as stream:
                text = "".join(
                    chunk["choices"][0]["text"] for chunk in events(stream.iter_lines())[:-1]
                )
        else:
            text = server.complete(**body)["choices"][0]["text"]
        found[number] = (text, prompt, sampling, most)

    found: dict[int, tuple[str, str, Sampling, int]] = {}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(64)))
    assert len(found) == 48
    for text, prompt, sampling, most in found.values():
        assert text == server.llm.generate(prompt, sampling, max_new_tokens=most).text
    server.idle()


def test_an_answer_says_what_drafting_did(server: Served) -> None:
    body = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "n": 2}
    found = server.complete(PROMPT, **body)["metrics"]["speculative_decoding"]
    steps, accepted, drafted = (
        found[f"num_{name}"] for name in ("spec_steps", "accepted_draft_tokens", "draft_tokens")
    )
    histogram = found["acceptance_histogram"]
    assert (
        sum(histogram) == steps
        and sum(number * count for number, count in enumerate(histogram)) == accepted <= drafted
    )
    if steps:
        assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
        assert found["draft_acceptance_rate"] == pytest.approx(accepted / drafted)
    plain = server.complete(PROMPT, draft=False, **body)["metrics"]["speculative_decoding"]
    assert (
        plain["num_spec_steps"] == plain["num_draft_tokens"] == 0
        and plain["mean_acceptance_length"] == 1
    )
