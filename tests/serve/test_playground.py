"""Tests of the playground in a browser. It shows the results of the batch, and a failure never
looks like a success."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from support.serving import Served, events, served

from eesd.serve.http.options import ServeOptions

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
KEY = "a-key-of-this-test"
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="There is no Chromium; install the package chromium."
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:  # makes a new profile for each browser
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1200, "height": 900}) as context:
        opened = context.new_page()
        complaints: list[str] = []
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.goto(server.url)
        expect(opened.locator("#model")).to_contain_text("up to 512 tokens")
        yield opened
        assert not complaints


def ask(page: Page, text: str, tokens: int = 40, **checked: bool) -> None:
    """Fill the form and start, without waiting for the end."""
    page.locator("input[value=completion]").check()
    page.locator("#prompt").fill(text)
    page.locator("#max-tokens").fill(str(tokens))
    for name, on in checked.items():
        page.locator(f"#{name}").set_checked(on)
    page.locator("#go").click()


def generated(page: Page) -> str:
    return "".join(page.locator("#output .tokens").last.locator("span").all_text_contents())


def stream(server: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.post("/playground/generate", body)
    assert response.status_code == 200, response.text
    return events(iter(response.text.splitlines()))


def test_the_events_are_what_the_batch_did(server: Served) -> None:
    expected = server.llm.generate("ab ab ab ab", max_new_tokens=40)
    for draft in (True, False):
        found = stream(
            server, {"prompt": "ab ab ab ab", "max_tokens": 40, "temperature": 0, "draft": draft}
        )
        tokens = [token for event in found for token in event["tokens"]]
        assert [token["id"] for token in tokens] == expected.tokens
        assert "".join(token["text"] for token in tokens) + found[-1]["held"] == expected.text
        stats = found[-1]["stats"]
        sources = [token["source"] for token in tokens]
        assert (
            stats["new_tokens"] == len(tokens)
            and found[-1]["finish_reason"] == expected.finish_reason
        )
        assert len(sources) - sources.count("verify") == stats["accepted_tokens"]
        assert (
            sum(len(event["rejected"]) for event in found)
            <= stats["draft_tokens"] - stats["accepted_tokens"]
        )
        assert stats["draft_tokens"] > 0 if draft else set(sources) == {"verify"}
        assert all(event["finish_reason"] is None for event in found[:-1])
    assert set(found[-1]["learned"]) == {"alone", "accept", "text"}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "a", "messages": [{"role": "user", "content": "b"}]},
        {"prompt": "a", "n": 2},
        {"prompt": 5},
    ],
)
def test_what_cannot_be_asked_is_refused(server: Served, body: dict[str, Any]) -> None:
    response = server.post("/playground/generate", body)
    assert response.status_code == 400 and response.json()["error"]["message"].endswith(".")


def test_the_page_needs_nothing_from_elsewhere(server: Served) -> None:
    with server.http as http:
        for path in ("/", "/playground/app.js", "/playground/style.css"):
            response = http.get(path)
            assert response.status_code == 200
            assert "default-src 'none'" in response.headers["content-security-policy"]
            assert "unsafe" not in response.headers["content-security-policy"]
            assert "//" not in response.text.replace("// ", "").replace(
                "http://www.w3.org/2000/svg", ""
            )


@needs_browser
def test_tokens_show_who_wrote_them(page: Page, server: Served) -> None:
    ask(page, "ab ab ab ab")
    expect(page.locator("#status")).to_contain_text("40 tokens in")
    assert generated(page) == server.llm.generate("ab ab ab ab", max_new_tokens=40).text
    kinds = set(
        page.locator("#output .tokens span").evaluate_all(
            "spans => spans.map(span => span.className)"
        )
    )
    assert "verify" in kinds and kinds <= {"exit", "text", "verify"}
    expect(page.locator("#speed .value").first).to_contain_text("a round")
    expect(page.locator("#acceptance .note")).to_contain_text("draft tokens were accepted")
    expect(page.locator("#rounds svg")).to_be_visible()
    expect(page.locator("#estimate .note")).to_contain_text("for all requests of the batch")


def test_log_probabilities_are_those_of_the_api(server: Served) -> None:
    body = {"prompt": "ab ab", "max_tokens": 9, "temperature": 0, "logprobs": 3}
    found = [token for event in stream(server, body) for token in event["tokens"]]
    answer = server.complete(**body)["choices"][0]["logprobs"]
    assert [token["logprob"] for token in found] == pytest.approx(
        answer["token_logprobs"], abs=1e-3
    )
    assert [len(token["top"]) for token in found] == [3] * 9
    for token in found:
        values = [value for _, value in token["top"]]
        assert values == sorted(values, reverse=True) and token["logprob"] == values[0]


@needs_browser
def test_each_token_has_its_probability_and_alternatives(page: Page) -> None:
    ask(page, "ab ab ab ab")
    expect(page.locator("#status")).to_contain_text("40 tokens in")
    tip = page.locator("#tip")
    page.locator("#output .tokens > span").nth(3).hover()
    expect(tip.locator("span")).to_have_count(5)
    expect(tip.locator(".chosen")).to_contain_text(" %")
    expect(tip.locator("span").first).to_contain_text("Source: ")
    page.mouse.move(0, 0)
    page.locator("#output").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    expect(page.locator("#output .tokens > span").first).to_have_class(re.compile("current"))
    expect(tip).to_be_visible()
    page.locator("#more summary").click()
    page.locator("#probabilities").uncheck()
    page.locator("#go").click()
    expect(page.locator("#output .exchange")).to_have_count(2)
    expect(page.locator("#status")).to_contain_text("40 tokens in")
    page.locator("#output .tokens").last.locator("span").first.hover()
    expect(tip.locator("span")).to_have_count(1)


@needs_browser
def test_a_lone_user_sees_the_controller_learn_and_an_estimate(
    browser: Browser, lined: Served
) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(lined.url)
        expect(page.locator("#model")).to_contain_text("up to")
        ask(page, "ab ab ab", tokens=60)
        expect(page.locator("#status")).to_contain_text("tokens in")
        note = page.locator("#estimate .note")
        expect(note).to_contain_text("Estimates for this text")
        expect(page.locator("#speed .note")).to_contain_text("times as fast as plain decoding")
        first = note.text_content()
        page.locator("#prompt").fill("cd cd cd cd")
        page.locator("#go").click()
        expect(page.locator("#output .tools")).to_have_count(2)
        assert note.text_content() != first


@needs_browser
def test_acceptance_of_head_and_text_stands_apart_and_few_samples_are_hidden(page: Page) -> None:
    counts = {"verified": [40, 20, 4], "accepted": [30, 6, 3], "text": [10, 2, 0]}
    stats = {
        "draft_tokens": 64,
        "accepted_tokens": 39,
        "accepted_text_tokens": 5,
        "verified_at_depth": counts["verified"],
        "accepted_at_depth": counts["accepted"],
        "text_verified_at_depth": counts["text"],
        "text_accepted_at_depth": [5, 0, 0],
    }
    event = made_event([("x", "exit"), ("y", "verify")], [], "length", **stats)
    page.route("**/playground/generate", failing(event))
    ask(page, "a")
    bars = page.locator("#acceptance .bar")
    expect(bars).to_have_text(["head 183 % of 30", "head 233 % of 18", "text 150 % of 10"])
    assert bars.locator(".fill").evaluate_all("all => all.map(one => one.className)") == [
        "fill exit",
        "fill exit",
        "fill text",
    ]
    expect(page.locator("#acceptance .note")).to_contain_text("fewer than 5 samples are hidden")


@needs_browser
def test_an_exchange_can_be_copied_retried_and_edited(page: Page) -> None:
    asked: list[Any] = []
    page.on(
        "request",
        lambda request: asked.append(request.post_data_json) if request.method == "POST" else None,
    )
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.locator("input[value=chat]").check()
    page.locator("#max-tokens").fill("8")
    for count, text in enumerate(("Hi", "More"), start=1):
        page.locator("#prompt").fill(text)
        page.locator("#go").click()
        expect(page.locator("#output .tools")).to_have_count(count)
    page.get_by_text("Copy").last.click()
    assert page.evaluate("window.copied") == generated(page)
    expect(page.get_by_text("Retry")).to_have_count(1)  # only the last message has it
    page.get_by_text("Retry").click()
    expect(page.locator("#output .exchange")).to_have_count(2)
    expect(page.locator("#output .tools")).to_have_count(2)
    assert asked[2]["messages"] == asked[1]["messages"]
    page.get_by_text("Edit").click()
    expect(page.locator("#prompt")).to_have_value("More")
    expect(page.locator("#output .exchange")).to_have_count(1)
    page.locator("#prompt").fill("Other")
    page.locator("#go").click()
    expect(page.locator("#output .tools")).to_have_count(2)
    contents = [message["content"] for message in asked[3]["messages"]]
    assert contents[::2] == ["Hi", "Other"] and len(contents) == 3


@needs_browser
def test_a_refused_message_leaves_the_conversation(page: Page) -> None:
    page.locator("input[value=chat]").check()
    page.locator("#prompt").fill("a" * 600)
    page.locator("#go").click()
    expect(page.locator("#alert")).to_contain_text("give at most")
    expect(page.locator("#output")).to_be_empty()
    expect(page.locator("#prompt")).to_have_value("a" * 600)


@needs_browser
@pytest.mark.parametrize("width", [390, 900, 1400])
def test_the_head_of_a_long_answer_stays_in_view(
    browser: Browser, server: Served, width: int
) -> None:
    with browser.new_context(viewport={"width": width, "height": 600}) as context:
        page = context.new_page()
        page.goto(server.url)
        expect(page.locator("#model")).to_contain_text("up to")
        page.locator("input[value=chat]").check()
        page.locator("#max-tokens").fill("120")
        for count, text in enumerate(("first", "second"), start=1):
            page.locator("#prompt").fill(text)
            page.locator("#go").click()
            expect(page.locator("#output .tools")).to_have_count(count)
            head = page.locator("#output .question").last.bounding_box()
            bar = page.locator("#text-head").bounding_box()
            assert head and bar and bar["y"] + bar["height"] <= head["y"] < 400
        inside = page.locator("#output").evaluate("box => box.scrollHeight - box.clientHeight")
        assert inside == 0


@needs_browser
def test_rejected_drafts_are_shown_to_pointer_and_keyboard(page: Page) -> None:
    page.route(
        "**/playground/generate",
        lambda route: route.fulfill(body=REJECTING, content_type="text/event-stream"),
    )
    ask(page, "a")
    expect(page.locator("#status")).to_contain_text("tokens in")
    tip = page.locator("#tip")
    marks = page.locator("#output .mark")
    expect(marks).to_have_count(2)
    marks.first.hover()
    expect(tip).to_have_text("Rejected ␣bad⏎Verifier ␣good")
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    page.locator("#output").focus()
    page.keyboard.press("Tab")
    expect(marks.first).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(marks.nth(1)).to_be_focused()
    expect(tip).to_contain_text("worse")
    assert "Rejected: worse" in str(marks.nth(1).get_attribute("aria-label"))


def made_event(
    tokens: list[tuple[str, str]], rejected: list[str], reason: str | None = None, **more: Any
) -> str:
    stats = {
        "new_tokens": 2,
        "tokens_per_second": 9.0,
        "tokens_per_round": 1.0,
        "decode_seconds": 0.2,
        **more,
    }
    listed = [{"id": 1, "text": text, "source": source} for text, source in tokens]
    event = {
        "tokens": listed,
        "rejected": rejected,
        "held": "",
        "finish_reason": reason,
        "stats": stats,
        "learned": None,
    }
    return f"data: {json.dumps(event)}\n\n"


REJECTING = made_event([(" good", "verify")], [" bad\n"]) + made_event(
    [("x", "exit"), ("y", "verify")], ["worse"], "length"
)


@needs_browser
def test_both_ways_are_compared(page: Page) -> None:
    ask(page, "ab ab ab", compare=True)
    expect(page.locator("#speed .note")).to_contain_text("All 40 tokens are equal")
    expect(page.locator("#output h3")).to_have_text(["With drafting", "Plain decoding"])
    first, second = (page.locator("#output .tokens").nth(at).text_content() for at in (0, 1))
    assert first == second
    assert set(
        page.locator("#output .tokens")
        .nth(1)
        .locator("span")
        .evaluate_all("a => a.map(s => s.className)")
    ) == {"verify"}
    expect(page.locator("#alert")).to_be_hidden()


@needs_browser
def test_the_switch_turns_drafting_off(page: Page) -> None:
    ask(page, "ab ab ab", draft=False)
    expect(page.locator("#status")).to_contain_text("40 tokens in")
    assert page.locator("#output span.exit, #output span.text").count() == 0
    expect(page.locator("#acceptance .note")).to_contain_text("Nothing has been drafted")
    page.locator("#draft").check()
    page.locator("#go").click()  # both have the same prompt, so both are measured
    expect(page.locator("#speed .note")).to_contain_text("All 40 tokens are equal")


@needs_browser
def test_a_chat_goes_on(page: Page) -> None:
    asked: list[Any] = []
    page.on(
        "request",
        lambda request: asked.append(request.post_data_json) if request.method == "POST" else None,
    )
    for text in ("Hi", "More"):
        page.locator("input[value=chat]").check()
        page.locator("#max-tokens").fill("8")
        page.locator("#prompt").fill(text)
        page.keyboard.press("Control+Enter")
        expect(page.locator("#prompt")).to_have_value("")  # emptied when the answer is complete
        expect(page.locator("#status")).to_contain_text("tokens in")
    first, second = (request["messages"] for request in asked)
    assert [message["role"] for message in second] == ["user", "assistant", "user"] and second[
        0
    ] == first[0]
    page.locator("#clear").click()
    expect(page.locator("#output")).to_be_empty()


@needs_browser
def test_more_options_lie_in_a_fold(page: Page) -> None:
    asked: list[Any] = []
    page.on(
        "request",
        lambda request: asked.append(request.post_data_json) if request.method == "POST" else None,
    )
    expect(page.locator("#system")).to_be_hidden()
    page.locator("#top-p").evaluate("input => input.value = 2")
    ask(page, "ab ab")
    expect(page.locator("#more")).to_have_attribute("open", "")  # the wrong field is visible
    assert not asked
    page.locator("#top-p").fill("0.9")
    page.locator("#stops").fill("b\n\\n\n")
    page.locator("#go").click()
    expect(page.locator("#status")).to_contain_text("tokens in")
    assert (asked[-1]["top_p"], asked[-1]["stop"]) == (0.9, ["b", "\n"])
    assert "b" not in generated(page) and "\n" not in generated(page)
    expect(page.locator("#system")).to_be_hidden()  # for chats only
    page.locator("input[value=chat]").check()
    page.locator("#system").fill("Be brief.")
    page.locator("#prompt").fill("Hi")
    page.locator("#go").click()
    expect(page.locator("#prompt")).to_have_value("")
    assert [message["role"] for message in asked[-1]["messages"]] == ["system", "user"]
    assert asked[-1]["messages"][0]["content"] == "Be brief."


@needs_browser
@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_an_example_is_one_click(page: Page, mode: str) -> None:
    page.locator(f"input[value={mode}]").check()
    page.locator("#prompt").fill("mine")
    expect(page.locator("#example")).to_be_hidden()  # a text is never replaced
    page.locator("#prompt").fill("")
    page.locator("#example").click()
    expect(page.locator("#status")).to_contain_text("tokens in")
    expect(page.locator("#output")).to_contain_text(
        "numbers from 1 to n" if mode == "chat" else "def fibonacci(n):"
    )


@needs_browser
def test_stopping_ends_the_request(page: Page, server: Served) -> None:
    ask(page, "ab ab", tokens=400)
    expect(page.locator("#output .tokens span").first).to_be_attached()
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_contain_text("tokens")  # stopped, or already complete
    expect(page.locator("#go")).to_be_enabled()
    server.idle()


def failing(body: str, status: int = 200) -> Any:
    kind = "application/json" if status != 200 else "text/event-stream"
    return lambda route: route.fulfill(status=status, body=body, content_type=kind)


def lost(route: Route) -> None:
    route.abort()


BEGUN = made_event([("x", "verify")], [])
ERROR = json.dumps({"error": {"message": "The batch failed."}})
DIFFERENT = made_event([("x", "exit"), ("z", "verify")], [], "length")
FAILURES = {
    "a stream that stops": (failing(BEGUN), "before the text was complete"),
    "an error in the stream": (failing(f"{BEGUN}data: {ERROR}\n\n"), "The batch failed."),
    "an error": (failing(ERROR, 500), "The batch failed."),
    "another server's error": (failing("<h1>Bad gateway</h1>", 502), "status 502"),
    "no server": (lost, "cannot be reached"),
    "a late text": (failing(made_event([("x", "verify")], [], "deadline")), "not complete"),
}


@needs_browser
@pytest.mark.parametrize(("answer", "words"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_shown_in_words(page: Page, answer: Any, words: str) -> None:
    page.route("**/playground/generate", answer)
    ask(page, "a")
    expect(page.locator("#alert")).to_contain_text(words)
    expect(page.locator("#alert")).to_be_visible()
    expect(page.locator("#go")).to_be_enabled()
    expect(page.locator("#status")).not_to_contain_text("Max tokens")


@needs_browser
def test_tokens_that_differ_are_a_failure(page: Page) -> None:
    answers = iter([REJECTING, DIFFERENT.replace('"id": 1', '"id": 2')])
    page.route(
        "**/playground/generate",
        lambda route: route.fulfill(body=next(answers), content_type="text/event-stream"),
    )
    ask(page, "a", compare=True)
    expect(page.locator("#alert")).to_contain_text("differ at token 1")
    expect(page.locator("#speed .note")).to_have_text("The tokens differ.")


@needs_browser
def test_an_empty_prompt_and_bad_values_are_explained(page: Page) -> None:
    ask(page, "   ")
    expect(page.locator("#alert")).to_contain_text("The prompt is empty")
    ask(page, "a" * 600)
    expect(page.locator("#alert")).to_contain_text("give at most 511")


@needs_browser
def test_a_key_is_asked_for_where_one_is_needed(browser: Browser, engine: Path) -> None:
    with served(engine, ServeOptions(api_keys=(KEY,))) as running, browser.new_context() as context:
        page = context.new_page()
        page.goto(running.url)
        expect(page.locator("#alert")).to_contain_text("API key is missing")
        page.locator("#key").fill(KEY)
        page.locator("#key").press("Tab")
        expect(page.locator("#alert")).to_be_hidden()
        ask(page, "ab", tokens=4)
        expect(page.locator("#status")).to_contain_text("4 tokens in")


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser: Browser, server: Served, scheme: Any) -> None:
    with browser.new_context(
        viewport={"width": 320, "height": 640}, color_scheme=scheme, has_touch=True
    ) as context:
        page = context.new_page()
        page.goto(server.url)
        expect(page.locator("#model")).to_contain_text("up to")
        ask(page, "ab ab ab " + "x" * 60, compare=True)
        # The Generate button was below the form.
        expect(page.locator("#output .tokens span").first).to_be_in_viewport()
        expect(page.locator("#speed .note")).to_contain_text("All 40 tokens are equal")
        assert page.locator("html").evaluate("page => page.scrollWidth") <= 320
        for button in ("#go", "#clear"):
            box = page.locator(button).bounding_box()
            assert box and box["height"] >= 40
