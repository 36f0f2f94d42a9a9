"""Tests that the logit bias, the penalties for presence and frequency, and the end tokens follow
their definitions, whatever is drafted."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import late_gpus
from support.late_gpus import SETTINGS, Planned, late_llm
from support.lossless_checks import check_reduced_proposals
from support.serving import Served, served

import eesd
from eesd.common.errors import EESDError
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import LLM, Speculation
from eesd.runtime.request import Request

PROMPT = [1, 17, 5, 40, 3, 88, 61]
COUNT = 40
OPTIONS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "negative": {"presence_penalty": -0.4, "frequency_penalty": -0.02},
    "bias": {"logit_bias": {5: 4.0, 61: -100.0, 17: 1.5}},
    "all": {
        "presence_penalty": 0.6,
        "frequency_penalty": 0.2,
        "logit_bias": {5: 2.0, 9: 2.5},
        "repetition_penalty": 1.1,
    },
}
DRAFTING = {
    "chain": Speculation("fixed:k=4", guard=False, drafter="exit"),
    "tree": Speculation("fixed:k=3", 3, guard=False, drafter="exit"),
    "text": Speculation("fixed:k=4", guard=False, drafter="both"),
}


@pytest.fixture(scope="module", params=["ort", "torch"])
def plain(request: pytest.FixtureRequest, engine: Path) -> LLM:
    return eesd.load(engine, request.param, speculation=None, threads=1)


def by_definition(llm: LLM, options: dict[str, Any]) -> list[int]:
    """Returns greedy tokens. They are chosen one by one from the model's logits, as the definitions
    of the options say."""
    tokens = list(PROMPT)
    for _ in range(COUNT):
        with llm.session(tokens, max_new_tokens=1) as session:
            logits = session.peek().astype(np.float64)
        for token, value in options.get("logit_bias", {}).items():
            logits[token] += value
        for token in set(tokens):
            penalty = options.get("repetition_penalty", 1.0)
            logits[token] = (
                logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
            )
        for token, count in Counter(tokens[len(PROMPT) :]).items():
            logits[token] -= (
                options.get("presence_penalty", 0) + options.get("frequency_penalty", 0) * count
            )
        tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def definition(engine: Path) -> Callable[[str], list[int]]:
    """Returns a function that takes the name of options and gives the tokens that follow from their
    definition. They are computed only once."""
    llm = eesd.load(engine, "ort", speculation=None, threads=1)
    return cache(lambda name: by_definition(llm, OPTIONS[name]))


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_the_definition_with_and_without_drafting(
    plain: LLM, engine: Path, name: str, definition: Callable[[str], list[int]]
) -> None:
    expected = definition(name)
    sampling = Sampling(**OPTIONS[name])
    assert (
        plain.generate(PROMPT, sampling, max_new_tokens=COUNT, ignore_eos=True).tokens == expected
    )
    assert plain.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True).tokens != expected, (
        "the option changes something"
    )
    for speculation in DRAFTING.values():
        drafting = eesd.load(engine, "ort", speculation=speculation, threads=1)
        made = drafting.generate(PROMPT, sampling, max_new_tokens=COUNT, ignore_eos=True)
        assert made.tokens == expected and made.stats.draft_tokens > 0


@pytest.mark.parametrize("name", OPTIONS)
def test_coupled_sampling_gives_the_same_text_with_drafts(engine: Path, name: str) -> None:
    plain = eesd.load(engine, "ort", speculation=None, threads=1)
    for kind, speculation in DRAFTING.items():
        sampling = Sampling(**OPTIONS[name], temperature=0.9, top_p=0.95, seed=len(kind))
        drafting = eesd.load(engine, "ort", speculation=speculation, threads=1)
        tokens, wanted = (
            one.generate(PROMPT, sampling, max_new_tokens=COUNT, ignore_eos=True).tokens
            for one in (drafting, plain)
        )
        assert tokens == wanted


@pytest.mark.parametrize("name", OPTIONS)
def test_rejection_sampling_obeys_them(
    engine: Path, name: str, definition: Callable[[str], list[int]]
) -> None:
    """If the temperature is close to 0, the sampler is greedy. The options affect the distributions
    of the verifier and of the draft."""
    drafting = eesd.load(engine, "ort", speculation=DRAFTING["chain"], threads=1)
    cold = Sampling(**OPTIONS[name], temperature=1e-4, method="rejection", seed=3)
    assert drafting.generate(
        PROMPT, cold, max_new_tokens=COUNT, ignore_eos=True
    ).tokens == definition(name)


@pytest.mark.parametrize("name", ["presence", "bias", "all"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_vocabulary_proposes_what_the_whole_one_does(name: str, temperature: float) -> None:
    """Tokens without a column are left out, and all other tokens keep their biases."""
    options = OPTIONS[name] | (
        {"logit_bias": {5: 2.0, 6: 2.5, 96: 1.0, 95: 3.0}} if "logit_bias" in OPTIONS[name] else {}
    )
    check_reduced_proposals(Sampling(**options, temperature=temperature, seed=1), 3)


@pytest.mark.parametrize("name", ["chain", "tree in 3 stages on 2 GPUs", "chain by torch"])
def test_a_gpu_has_them_too(planned: Planned, name: str) -> None:
    """On a GPU, the host then chooses the token."""
    setting = SETTINGS[name]
    directory = planned(setting)
    plain = eesd.load(directory, "ort", speculation=None, threads=1)
    samplings = [
        Sampling(**options, temperature=0.8 * (at % 2), seed=at)
        for at, options in enumerate(OPTIONS.values())
    ]
    with late_llm(directory, setting, seed=0) as (_, llm):
        for sampling in samplings:
            tokens, wanted = (
                one.generate(
                    late_gpus.PROMPTS[1], sampling, max_new_tokens=12, ignore_eos=True
                ).tokens
                for one in (llm, plain)
            )
            assert tokens == wanted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"logit_bias": {1: 101}}, "logit_bias"),
        ({"logit_bias": {-1: 1}}, "logit_bias"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"logit_bias": {1.5: 2}}, "logit_bias"),
    ],
)
def test_other_values_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(EESDError, match=words):
        Sampling(**options)
    with pytest.raises(EESDError, match="stop"):
        Request(tokens=[1], stop_token_ids=(-1,))


def test_a_sampling_with_a_bias_can_be_compared_and_hashed() -> None:
    one = Sampling(logit_bias={1: 2.0})
    assert {one, replace(one)} == {one} and one != Sampling() and one.logit_bias == ((1, 2.0),)


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Served]:
    with served(engine) as running:
        yield running


@pytest.mark.parametrize("name", OPTIONS)
def test_the_server_takes_them(server: Served, name: str) -> None:
    """A request gets the tokens of the Python API, whether it runs alone or with other requests."""
    options = OPTIONS[name]
    body = {name: value for name, value in options.items() if name != "logit_bias"}
    if "logit_bias" in options:
        body["logit_bias"] = {str(token): value for token, value in options["logit_bias"].items()}
    expected = server.llm.generate(
        PROMPT, Sampling(**options), max_new_tokens=COUNT, ignore_eos=True
    ).text
    more = {"max_tokens": COUNT, "ignore_eos": True, "temperature": 0}
    found = server.complete([PROMPT, PROMPT[:3], PROMPT], **body, **more)["choices"]
    assert (
        found[0]["text"]
        == found[2]["text"]
        == expected
        == server.complete(PROMPT, **body, **more)["choices"][0]["text"]
    )


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_stop_token_ends_the_text_and_is_not_in_it(server: Served, ignore_eos: bool) -> None:
    whole = server.llm.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True)
    stop = whole.tokens[9]
    first = whole.tokens.index(stop)
    body = {
        "max_tokens": COUNT,
        "ignore_eos": ignore_eos,
        "temperature": 0,
        "return_token_ids": True,
    }
    [choice] = server.complete(PROMPT, stop_token_ids=[stop], **body)["choices"]
    assert choice["finish_reason"] == "stop" and choice["token_ids"] == whole.tokens[: first + 1]
    assert whole.text.startswith(choice["text"]) and len(choice["text"]) == first, (
        "one character a token"
    )
    [later] = server.complete(PROMPT, stop_token_ids=[stop], min_tokens=first + 5, **body)[
        "choices"
    ]
    assert stop not in later["token_ids"][: first + 4]
