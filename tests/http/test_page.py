"""The page in a browser: it asks, shows what comes, stops, clears, tells what went wrong; nothing is from elsewhere."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Page, browser
from fake_engine import FakeCodec, expected_text, expected_tokens
from gateway import KEY, RunningGateway, ScriptedEngine, gateway_at, running_gateway
from served import eventually, serve_in

import lowlat.serving.http
from lowlat.ipc.limits import Limits
from lowlat.ipc.messages import Message

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
        self.page.write("#max-tokens", "" if at_most is None else str(at_most))
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
    engine.step_s, engine.faults = 0.001, {}
    engine.asked.clear()
    engine.prompts.clear()
    yield _shown
    _shown.page.open("about:blank")
    eventually(lambda: not engine.busy)


def test_files_name_no_other_host_and_need_no_inline_code() -> None:
    for file in PAGE.iterdir():
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
    assert page.evaluate("location.hash") == "" and page.evaluate("sessionStorage.length") == 1
    shown.ask("Hi", 6)
    shown.answered(1)
    spans = page.evaluate("[...document.querySelectorAll('.message .token')].map(s => [s.textContent, s.className])")
    assert "".join(text for text, _ in spans) == expected_text(tokens)
    assert [name for _, name in spans] == ["token drafted", "token drafted", "token"] * 2
    assert page.evaluate("document.getElementById('per-step').textContent") == "3.00"
    assert page.evaluate("document.getElementById('ttft').textContent").endswith(" ms")
    assert "cut after 6 tokens: “at most”" in shown.text(".note")
    page.until("document.querySelectorAll('#slots .bar').length == 4")
    light = page.evaluate(BACKGROUND)
    shown.open(scheme="dark")
    assert page.evaluate(BACKGROUND) != light
    assert page.evaluate("performance.getEntriesByType('resource').every(e => e.name.startsWith(location.origin))")


@needs_browser
@pytest.mark.parametrize("size", SIZES)
def test_stop_and_clear_amid_an_answer(shown: Shown, size: str) -> None:
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
    said = page.evaluate("[...document.querySelectorAll('.text')].at(-1).textContent")
    eventually(lambda: len(engine.cancelled_at) == num_cancelled + 1)
    page.write("#prompt", "Two")
    page.click("#send")
    page.until("document.querySelectorAll('.message:last-child .token').length > 9")
    assert engine.prompts == ["<user>One", f"<user>One<assistant>{said}<user>Two"]
    page.click("#clear")
    assert page.evaluate(QUIET) and page.evaluate("document.getElementById('messages').childElementCount") == 0
    eventually(lambda: len(engine.cancelled_at) == num_cancelled + 2)
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
@pytest.mark.parametrize("size", SIZES)
def test_any_text_fits_and_all_is_named(shown: Shown, size: str) -> None:
    page = shown.page
    shown.open(size)
    shown.ask("שלום, " + "ארוך" * 200 + "W" * 400, 3)
    shown.answered(1)
    assert page.evaluate("getComputedStyle(document.querySelector('.user .text')).direction") == "rtl"
    assert page.evaluate("getComputedStyle([...document.querySelectorAll('.text')].at(-1)).direction") == "ltr"
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
    assert names >= {"Conversation", "Prompt", "temperature", "Clear", "Send", "You", "Answer"} and "" not in names
    log = "document.querySelector('[role=log][aria-live=polite]')"
    assert page.evaluate(f"{log}.ariaBusy") == "false"
    if size == "phone":
        assert not page.evaluate("document.getElementById('figures').checkVisibility()")
        page.click("#show-figures")
        assert page.evaluate("document.getElementById('show-figures').ariaExpanded") == "true"
        page.click("#send")  # still in view
    assert page.evaluate("document.getElementById('figures').checkVisibility()")


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
        assert "The connection broke" in shown.text(".error")
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
