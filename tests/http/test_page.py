"""The page in a browser: it asks, shows what comes, tints drafts, keeps the key, and loads nothing from elsewhere."""

import re
from pathlib import Path

import pytest
from browser import CHROMIUM, browser
from fake_engine import FakeCodec, expected_text, expected_tokens
from gateway import KEY, ScriptedEngine, running_gateway

import lowlat.serving.http
from lowlat.ipc.messages import Message

PAGE = Path(lowlat.serving.http.__file__).parent / "page"
ASK = "document.getElementById('prompt').value = 'Hi'; document.getElementById('send').click()"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def test_files_name_no_other_host_and_need_no_inline_code() -> None:
    for file in PAGE.iterdir():
        text = file.read_text()
        assert not re.search(r"(https?:)?//[a-z]", text.replace("// ", "")), file
        assert "innerHTML" not in text and "eval(" not in text, file
    assert not re.search(r"<script>|<style|\son[a-z]+=|\sstyle=", (PAGE / "index.html").read_text())


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_chat_in_a_browser(tmp_path: Path) -> None:
    tokens = expected_tokens(FakeCodec().encode_chat([Message("user", "Hi")], {}), 6)
    own = tmp_path / "own"
    own.mkdir()
    with running_gateway(own, ScriptedEngine(tokens_per_step=3)) as gateway, browser(tmp_path / "profile") as page:
        page.open(gateway.address.url() + "/")
        page.until("document.querySelector('#state.bad') && !document.getElementById('key-form').hidden")
        page.open(f"{gateway.address.url()}/#key={KEY}")
        page.until("document.getElementById('model')?.textContent == 'fake'")
        assert page.evaluate("location.hash") == "" and page.evaluate("sessionStorage.length") == 1
        page.evaluate("document.getElementById('max-tokens').value = 6")
        page.evaluate(ASK)
        page.until("document.getElementById('messages').dataset.answered == '1'")
        spans = page.evaluate(
            "[...document.querySelectorAll('.message .token')].map(s => [s.textContent, s.className])"
        )
        assert "".join(text for text, _ in spans) == expected_text(tokens)
        assert [name for _, name in spans] == ["token drafted", "token drafted", "token"] * 2
        assert page.evaluate("document.getElementById('per-step').textContent") == "3.00"
        assert page.evaluate("document.getElementById('ttft').textContent").endswith(" ms")
        page.until("document.querySelectorAll('#slots .bar').length == 4")
        page.evaluate("document.getElementById('max-tokens').value = 100000")
        page.evaluate(ASK)
        assert "max_context" in page.until("document.querySelector('.error')?.textContent")
        light = page.evaluate(BACKGROUND)
        page.open(f"{gateway.address.url()}/#key={KEY}", scheme="dark")
        page.until("document.getElementById('model')?.textContent == 'fake'")
        assert page.evaluate(BACKGROUND) != light
        assert page.evaluate("performance.getEntriesByType('resource').every(e => e.name.startsWith(location.origin))")
