"""The page in a browser: it asks, shows what comes, stops, keeps, tells what went wrong; nothing is from elsewhere."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Page, browser
from fake_engine import FakeCodec, expected_text, expected_tokens
from gateway import KEY, RunningGateway, ScriptedEngine, gateway_at, running_gateway
from served import eventually, serve_in
from stages import wide

import lowlat.serving.http
from lowlat.ipc.limits import Limits
from lowlat.ipc.messages import Message, ToolCallDelta

pytestmark = pytest.mark.second  # a browser's start, and seconds of waiting for it

PAGE = Path(lowlat.serving.http.__file__).parent / "page"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
SIZES: dict[str, Any] = {
    "desktop": {"width": 1100, "height": 640},
    "phone": {"width": 390, "height": 660, "mobile": True},
}
SLOW_STEP_S = 0.01
TOKENS = "document.querySelectorAll('.message .token').length"
BOX = "document.getElementById('prompt').value"
QUIET = "document.getElementById('stop').hidden"

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@dataclass
class Shown:
    """The page in a tab, and the engine after it."""

    page: Page
    gateway: RunningGateway
    engine: ScriptedEngine

    def open(self, size: str = "desktop", *, scheme: str = "light") -> None:
        """Load the page with the key, and wait until it knows the model."""
        self.page.open(f"{self.gateway.address.url()}/#key={KEY}", **SIZES[size], scheme=scheme)
        self.page.until("document.getElementById('model')?.textContent == 'fake'")

    def ask(self, text: str, at_most: int | None = None) -> None:
        """Type a question and press Enter."""
        value = json.dumps("" if at_most is None else str(at_most))
        self.page.evaluate(f"document.getElementById('max_tokens').value = {value}")
        self.page.write("#prompt", text)
        self.page.press("Enter", text="\r")

    def answered(self, count: int) -> None:
        """Wait until that many questions have had an end."""
        self.page.until(f"document.getElementById('messages').dataset.answered == '{count}' && {QUIET}")

    def text(self, selector: str) -> str:
        """The text of the last such element, as it is seen."""
        return str(self.page.until(f"[...document.querySelectorAll({selector!r})].at(-1)?.innerText"))


@pytest.fixture(scope="module")
def _shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    engine = ScriptedEngine(tokens_per_step=3)
    with (
        running_gateway(tmp_path_factory.mktemp("gateway"), engine) as gateway,
        browser(tmp_path_factory.mktemp("profile")) as page,
    ):
        yield Shown(page, gateway, engine)


@pytest.fixture
def shown(_shown: Shown) -> Iterator[Shown]:
    """A browser and a gateway, which the tests share."""
    engine = _shown.engine
    engine.step_s, engine.faults, engine.parts = 0.001, {}, []
    engine.asked.clear()
    engine.prompts.clear()
    yield _shown
    _shown.page.evaluate("if (location.host) localStorage.clear()")
    _shown.page.open("about:blank")
    eventually(lambda: not engine.busy)


def test_files_name_no_other_host_and_need_no_inline_code() -> None:
    own = [file for file in PAGE.iterdir() if file.is_file()]
    assert {file.stem for file in (PAGE / "vendor").iterdir()} == {"markdown-it"}  # and its licence
    for file in own:
        text = file.read_text()
        assert not re.search(r"(https?:)?//[a-z]", text.replace("// ", "")), file
        assert "innerHTML" not in text and "eval(" not in text, file
    assert not re.search(r"<script>|<style|\son[a-z]+=|\sstyle=", (PAGE / "index.html").read_text())


@needs_browser
def test_a_chat_in_a_browser(shown: Shown) -> None:
    page = shown.page
    tokens = expected_tokens(FakeCodec().encode_chat([Message("user", "Hi")], {}), 6)
    page.open(shown.gateway.address.url() + "/")
    page.until("document.querySelector('#state.bad') && !document.getElementById('key-form').hidden")
    assert shown.text("#state") == "needs the key"
    shown.open()
    assert page.evaluate("location.hash") == "" and page.evaluate("Object.keys(localStorage)") == []
    shown.ask("Hi", 6)
    shown.answered(1)
    spans = page.evaluate("[...document.querySelectorAll('.message .token')].map(s => [s.textContent, s.className])")
    assert "".join(text for text, _ in spans) == expected_text(tokens)
    assert [name for _, name in spans] == ["token drafted", "token drafted", "token"] * 2
    assert page.evaluate("document.getElementById('per-step').textContent") == "3.00"
    assert page.evaluate("document.getElementById('ttft').textContent").endswith(" ms")
    assert "cut after 6 tokens: “at most” in the options allows more" in shown.text(".note")
    page.until("document.querySelectorAll('#slots .bar').length == 4")
    light = page.evaluate(BACKGROUND)
    shown.open(scheme="dark")
    assert page.evaluate(BACKGROUND) != light
    assert page.evaluate("performance.getEntriesByType('resource').every(e => e.name.startsWith(location.origin))")


@needs_browser
@pytest.mark.parametrize("size", [wide("desktop"), "phone"])
def test_stop_and_leave_amid_an_answer(shown: Shown, size: str) -> None:
    page, engine = shown.page, shown.engine
    shown.open(size)
    engine.step_s = SLOW_STEP_S
    page.write("#prompt", "One")
    page.click("#send", times=2)  # the second click of a double click stops nothing
    page.until(f"{TOKENS} > 9")
    assert not page.evaluate(QUIET)
    num_cancelled = len(engine.cancelled_at)
    page.click("#stop")
    assert page.evaluate(QUIET) and page.evaluate("document.getElementById('send').checkVisibility()")
    assert shown.text(".note") == "stopped"
    said = page.evaluate("[...document.querySelectorAll('.tokens')].at(-1).textContent")
    eventually(lambda: len(engine.cancelled_at) == num_cancelled + 1)
    page.write("#prompt", "Two")
    page.click("#send")
    page.until("document.querySelectorAll('.message:last-child .token').length > 9")
    assert engine.prompts == ["<user>One", f"<user>One<assistant>{said}<user>Two"]
    page.evaluate("document.getElementById('new').click()")
    assert page.evaluate("document.getElementById('messages').childElementCount") == 0
    assert not page.evaluate(QUIET)  # the answer is written on, out of sight
    page.evaluate("document.querySelector('#kept li button').click()")
    assert page.evaluate("document.querySelectorAll('.message').length") == 4
    page.until("document.querySelectorAll('.message:last-child .token').length > 20")
    page.evaluate("document.querySelector('#kept li button:last-child').click()")  # deleted
    eventually(lambda: len(engine.cancelled_at) == num_cancelled + 2)
    assert page.evaluate("document.querySelectorAll('.message, #kept li').length") == 0
    shown.ask("Three", 3)
    shown.answered(1)
    assert engine.prompts[2] == "<user>Three"
    assert page.evaluate("document.querySelectorAll('.message').length") == 2


@needs_browser
def test_stop_before_the_first_token_returns_the_question(shown: Shown) -> None:
    page, engine = shown.page, shown.engine
    shown.open()
    engine.step_s = 0.3
    page.evaluate("document.getElementById('prompt').value = 'Hi'; document.getElementById('send').click()")
    page.evaluate("document.getElementById('stop').click()")
    assert shown.text(".note") == "stopped before it began" and page.evaluate(BOX) == "Hi"
    engine.step_s = 0.001
    shown.ask("Again", 3)
    shown.answered(2)
    assert engine.prompts[-1] == "<user>Again"


@needs_browser
def test_enter_asks_and_other_keys_write(shown: Shown) -> None:
    page, engine = shown.page, shown.engine
    shown.open()
    engine.step_s = SLOW_STEP_S
    page.write("#prompt", "a")
    page.press("Enter", modifiers=8, text="\r")  # Shift
    page.press("Enter", code=229)  # ends a composition
    assert page.evaluate(BOX) == "a\n" and not engine.prompts
    page.press("Enter", text="\r")
    page.until(f"{TOKENS} > 3")
    page.write("#prompt", "the next")
    page.press("Enter", text="\r")  # an answer is being written: the question waits in the box
    assert page.evaluate(BOX) == "the next" and page.evaluate("document.querySelectorAll('.user').length") == 1
    page.evaluate("document.getElementById('stop').focus()")
    page.press(" ", text=" ", code=32)
    assert page.evaluate(QUIET) and page.evaluate("document.activeElement.id") == "send"
    assert page.evaluate(BOX) == "the next"
    page.write("#prompt", "  ")
    page.click("#send")
    assert page.evaluate("document.querySelectorAll('.user').length") == 1


@needs_browser
def test_who_scrolls_up_is_left_there(shown: Shown) -> None:
    page = shown.page
    shown.open("phone")
    shown.engine.step_s = SLOW_STEP_S
    shown.ask("Hi")
    page.until("document.getElementById('messages').scrollTop > 100")  # it follows
    page.evaluate("document.getElementById('messages').scrollTop = 20")
    num_tokens = page.evaluate(TOKENS)
    page.until(f"{TOKENS} > {num_tokens} + 60")
    assert page.evaluate("document.getElementById('messages').scrollTop") == 20
    page.evaluate("document.getElementById('messages').scrollTop = 1e6")
    num_tokens = page.evaluate(TOKENS)
    page.until(f"{TOKENS} > {num_tokens} + 60")
    page.until("(m => m.scrollHeight - m.scrollTop - m.clientHeight < 2)(document.getElementById('messages'))")
    page.click("#stop")


@needs_browser
@pytest.mark.parametrize("size", [wide("desktop"), "phone"])
def test_any_text_fits_and_all_is_named(shown: Shown, size: str) -> None:
    page = shown.page
    shown.open(size)
    shown.ask("שלום, " + "ארוך" * 200 + "W" * 400, 3)
    shown.answered(1)
    assert page.evaluate("getComputedStyle(document.querySelector('.user .text')).direction") == "rtl"
    assert page.evaluate("getComputedStyle([...document.querySelectorAll('.marked p')].at(-1)).direction") == "ltr"
    page.write("#prompt", "مرحبا")
    assert page.evaluate("getComputedStyle(document.getElementById('prompt')).direction") == "rtl"
    overflowing = "[...document.querySelectorAll('html, main, #messages')].filter(e => e.scrollWidth > e.clientWidth)"
    assert page.evaluate(f"{overflowing}.length") == 0
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")  # Send is pinned, and in view
    page.click("#send")
    shown.answered(2)
    names = {
        node["name"]["value"]
        for node in page.call("Accessibility.getFullAXTree")["nodes"]
        if not node["ignored"] and node["role"]["value"] in ("log", "textbox", "spinbutton", "button", "article")
    }
    assert (
        names >= {"Conversation", "Prompt", "Options", "Send", "You", "Answer", "Edit the message"} and "" not in names
    )
    log = "document.querySelector('[role=log][aria-live=polite]')"
    assert page.evaluate(f"{log}.ariaBusy") == "false"
    if size == "phone":
        assert not page.evaluate("document.getElementById('figures').checkVisibility()")
        page.click("#show-figures")
        assert page.evaluate("document.getElementById('show-figures').ariaExpanded") == "true"
        page.click("#send")  # still in view
    assert page.evaluate("document.getElementById('figures').checkVisibility()")


MARKDOWN = """# Plan

1. **bold** <img src=x onerror=alert(1)> [link](javascript:alert(1)) [good](https://example.org/)

```python
print("hi")
```

| a | b |
|---|--:|
| 1 | 2 |
"""


def text_parts(text: str, size: int = 7) -> list[Mapping[str, Any]]:
    """Parts of an answer that spell a text."""
    return [{"text": text[place : place + size]} for place in range(0, len(text), size)]


def labelled(label: str) -> str:
    """The selector of a control by its name, in the last message that has one."""
    return f"[...document.querySelectorAll('[aria-label={json.dumps(label)}]')].at(-1)"


@needs_browser
@pytest.mark.parametrize("size", ["desktop", wide("phone")])
def test_markdown_is_shown_and_copied(shown: Shown, size: str) -> None:
    page, engine = shown.page, shown.engine
    shown.open(size)
    engine.parts = text_parts(MARKDOWN)
    shown.ask("Plan")
    shown.answered(1)
    page.until("document.querySelector('.marked table') !== null")
    marked = "document.querySelector('.marked')"
    assert page.evaluate(f"{marked}.querySelector('h1').textContent") == "Plan"
    assert page.evaluate(f"{marked}.querySelector('li strong').textContent") == "bold"
    assert page.evaluate(f"[...{marked}.querySelectorAll('a')].map(a => a.href)") == ["https://example.org/"]
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.evaluate("getComputedStyle(document.querySelectorAll('td')[1]).textAlign") == "right"
    page.evaluate(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async t => { window.copied = t }}})"
    )
    for label, text in (("Copy the code", 'print("hi")\n'), ("Copy the message", MARKDOWN)):
        page.evaluate(f"{labelled(label)}.click()")
        assert page.evaluate("window.copied") == text
    assert page.evaluate(f"{labelled('Copy the code')}.textContent") == "Copied"
    assert page.evaluate("document.querySelector('.tokens').checkVisibility()") is False
    page.evaluate("document.getElementById('as-tokens').click()")
    assert page.evaluate("document.querySelector('.tokens').checkVisibility()")
    assert page.evaluate("document.querySelector('.marked').checkVisibility()") is False


@needs_browser
def test_branches_are_kept_through_a_reload(shown: Shown) -> None:
    page, engine = shown.page, shown.engine
    shown.open()
    for number, text in enumerate(("first", "second"), 1):
        engine.parts = text_parts(text)
        shown.ask(f"Question {number}")
        shown.answered(number)
    engine.parts = text_parts("third")
    page.evaluate(f"{labelled('Another answer')}.click()")
    page.until(f"document.querySelector('.message:last-child').innerText.includes('third') && {QUIET}")
    assert engine.prompts[-1] == engine.prompts[-2] == "<user>Question 1<assistant>first<user>Question 2"
    assert "2 of 2" in shown.text(".message")
    engine.parts = text_parts("fourth")
    page.evaluate("document.querySelector('[aria-label=\"Edit the message\"]').click()")
    page.write(".edit textarea", "Edited")
    page.press("Enter", text="\r")
    page.until(f"document.querySelector('.message:last-child').innerText.includes('fourth') && {QUIET}")
    assert engine.prompts[-1] == "<user>Edited"
    assert page.evaluate("document.querySelectorAll('.message').length") == 2
    page.evaluate(f"{labelled('The version before')}.click()")
    assert page.evaluate("document.querySelectorAll('.message').length") == 4
    page.reload()
    page.until("document.getElementById('model')?.textContent == 'fake'")
    assert page.evaluate("document.querySelectorAll('.message').length") == 4
    assert page.evaluate("document.title") == "Question 1 – lowlat"
    assert "third" in shown.text(".message")
    engine.parts, engine.faults = [], {ord("<"): "full"}
    page.evaluate(f"{labelled('Another answer')}.click()")
    assert "The server is busy: " in shown.text(".error")  # the answers before stay
    assert page.evaluate("document.querySelectorAll('.message').length") == 5
    assert page.evaluate(BOX) == ""


@needs_browser
def test_a_second_tab_has_the_key_and_the_conversations(shown: Shown) -> None:
    page, engine = shown.page, shown.engine
    shown.open()
    engine.parts = text_parts("here")
    shown.ask("Where?")
    shown.answered(1)
    page.evaluate("document.getElementById('new').click()")
    url = shown.gateway.address.url()
    with page.second(url + "/") as second:
        second.until("document.getElementById('model')?.textContent == 'fake'")
        second.evaluate("document.querySelector('#kept li button').click()")
        assert "here" in second.evaluate("document.querySelector('.message:last-child').innerText")
        second.evaluate("document.querySelector('#kept li button:last-child').click()")
    page.until("document.querySelectorAll('#kept li').length == 0")


@needs_browser
def test_options_reasoning_and_tool_calls(shown: Shown) -> None:
    page, engine = shown.page, shown.engine
    shown.open()
    call = ToolCallDelta(index=0, id="call-1", name="weather", arguments='{"city": "Bern"}')
    engine.parts = [{"reasoning": "Which city? "}, {"reasoning": "Bern."}, {"tool_calls": (call,)}]
    page.click("#show-options")
    page.write("#system", "Be brief.")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    page.write("#tools", json.dumps(tools))
    page.write("#top_p", "0.9")
    page.write("#seed", "7")
    assert shown.text("#show-options") == "Options (4)"
    page.click("#show-options")
    page.write("#prompt", "Weather?")
    page.press("Enter", text="\r")
    shown.answered(1)
    assert engine.asked[-1].top_p == 0.9 and engine.asked[-1].seed == 7
    assert "Be brief." in engine.prompts[-1]
    folded = page.evaluate("[...document.querySelectorAll('details')].map(d => [d.open, d.textContent])")
    assert folded[0][0] is False and folded[0][1].endswith("Which city? Bern.")
    assert folded[1][0] is True and "calls weather" in folded[1][1] and '"city": "Bern"' in folded[1][1]
    engine.parts = text_parts("Rain.")
    page.write(".results-form textarea", "rain")
    page.evaluate("document.querySelector('.results-form').requestSubmit()")
    page.until(f"document.querySelector('.message:last-child').innerText.includes('Rain.') && {QUIET}")
    assert "rain" in engine.prompts[-1]
    page.click("#show-options")
    page.write("#tools", "{")
    shown.ask("Again?")
    assert shown.text(".error").startswith("Tools: ")


CONTRASTS = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (c) => c.map((v) => v / 255).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ratio = (...pair) => {
    const [x, y] = pair.map((c) => light(rgb(c))).sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const ground = (e) => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c)) return c; } return "rgb(255, 255, 255)"; };
  return [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() && !e.disabled &&
    [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((e) => [ratio(getComputedStyle(e).color, ground(e)), e.tagName + '.' + e.className + '#' + e.id]);
})()"""


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_the_contrast_that_wcag_asks_for(shown: Shown, scheme: str) -> None:
    page = shown.page
    shown.open(scheme=scheme)
    shown.ask("Hi", 6)
    shown.answered(1)
    page.evaluate("document.getElementById('as-tokens').click()")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 20 and any("drafted" in name for _, name in found)
    assert [pair for pair in found if pair[0] < 4.5] == []
    edge = page.evaluate("getComputedStyle(document.querySelector('.message .drafted')).boxShadow")
    assert edge != "none"  # an accepted draft is told by more than its tint


@needs_browser
def test_what_went_wrong_is_told(shown: Shown) -> None:
    page, engine = shown.page, shown.engine
    shown.open()
    shown.ask("Hi", 100_000)
    assert "max_context" in shown.text(".error")
    shown.answered(1)
    assert page.evaluate(BOX) == "Hi"  # the question returns
    engine.faults = {ord("<"): "full"}
    shown.ask("Hi")
    shown.answered(2)
    assert "The server is busy: " in shown.text(".error") and "Send again" in shown.text(".error")
    engine.faults = {ord("<"): "nan"}
    shown.ask("Hi")
    shown.answered(3)
    assert "not finite" in shown.text(".error")


@pytest.mark.wide
@needs_browser
def test_server_and_gateway_may_go_and_come_back(shown: Shown, tmp_path: Path) -> None:
    page = shown.page
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    endpoint = f"ipc://{own}/s.sock"
    engine = ScriptedEngine()
    engine.info = replace(engine.info, has_chat_template=False)
    with ExitStack() as stack:
        with gateway_at(endpoint, connect_timeout_s=0.2) as address:
            page.open(f"{address.url()}/#key={KEY}")
            page.until("document.getElementById('state')?.textContent == 'server away; trying again'")
            shown.ask("Once")
            assert "The model's server is away: " in shown.text(".error")
            shown.answered(1)
            stack.enter_context(serve_in(own, engine, FakeCodec(), Limits(), {}))
            page.until("document.getElementById('state').textContent == 'serving'")
            assert "no chat template" in shown.text("#hint")
            page.click("#send")  # the question is in the box again
            shown.answered(2)
            assert engine.prompts == ["Once"] and engine.asked[0].max_tokens == 256
            assert "cut after 256 tokens" in shown.text(".note")
            engine.step_s = SLOW_STEP_S
            shown.ask("Twice", 4000)
            page.until(f"{TOKENS} > 256 + 5")
        shown.answered(3)
        assert "the gateway ends" in shown.text(".error")
        shown.ask("Are you there?", 3)
        shown.answered(4)
        assert "Nothing answers at 127.0.0.1" in shown.text(".error") and page.evaluate(BOX) == "Are you there?"
        page.until("document.getElementById('state').textContent == 'nothing answers; trying again'")
        with gateway_at(endpoint, port=address.port):
            page.until("document.getElementById('state').textContent == 'serving'")
            page.click("#send")
            page.until(f"document.querySelectorAll('.user').length == 5 && {QUIET}")
            assert engine.prompts[-1] == "Are you there?"
            page.open("about:blank")  # holds no connection
