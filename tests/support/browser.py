"""A headless Chromium, driven by the DevTools protocol over a pair of pipes."""

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["CHROMIUM", "Page", "browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-dev-shm-usage --remote-debugging-pipe"


class Page:
    """A browser's one tab."""

    def __init__(self, sending: int, receiving: int) -> None:
        self._sending = sending
        self._receiving = receiving
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._target: str | None = None
        self._unread = b""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._sending, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(
        self, url: str, *, width: int = 1100, height: int = 640, scheme: str = "light", mobile: bool = False
    ) -> None:
        """Go to a page in a new tab, and close the one before."""
        before, self._session = self._target, None
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        if before is not None:
            self.call("Target.closeTarget", targetId=before)
        self._session = self.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)

    def reload(self) -> None:
        """Load the page again, in the same tab."""
        self.evaluate("window.isOld = true")
        self.call("Page.reload")
        end = time.monotonic() + 20.0
        while True:
            try:
                if not self.evaluate("window.isOld"):
                    return
            except AssertionError:  # it was navigating
                assert time.monotonic() < end
            time.sleep(0.02)

    @contextmanager
    def second(self, url: str) -> Iterator["Page"]:
        """Another tab, as long as the context lasts; this one waits."""
        before = self._session, self._target
        try:
            self._session, self._target = None, None
            self.open(url)
            yield self
        finally:
            target = self._target
            self._session = None
            self.call("Target.closeTarget", targetId=target)
            self._session, self._target = before

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, timeout_s: float = 20.0) -> Any:
        """The first true value of an expression."""
        end = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, (expression, self.evaluate("document.body?.innerText"))
            time.sleep(0.02)
        return value

    def click(self, selector: str, *, times: int = 1) -> None:
        """Press the mouse in the middle of an element that is in view; `times` 2 is a double click."""
        box = self.evaluate(
            f"(element => {{ const b = element.getBoundingClientRect(), x = b.x + b.width / 2, y = b.y + b.height / 2;"
            f"return [x, y, element.contains(document.elementFromPoint(x, y))] }})({_found(selector)})"
        )
        assert box[2], f"{selector} is not in view at {box[:2]}"
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=count)

    def press(self, key: str, *, modifiers: int = 0, text: str = "", code: int = 13) -> None:
        """Press a key where the focus is; modifiers 8 is Shift, code 229 a key of an input method."""
        options = {"key": key, "modifiers": modifiers, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **options)
        self.call("Input.dispatchKeyEvent", type="keyUp", **options)

    def write(self, selector: str, text: str) -> None:
        """Put the focus into a field, and text in place of what it holds."""
        self.evaluate(
            f"(() => {{ const field = document.querySelector({selector!r}); field.focus(); field.select(); }})()"
        )
        self.call("Input.insertText", text=text)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            piece = os.read(self._receiving, 1 << 16)
            assert piece, "the browser ended"
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


def _found(selector: str) -> str:
    return f"document.querySelector({selector!r})"


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with an empty profile, as long as the context lasts."""
    to_read, sending = os.pipe()
    receiving, to_write = os.pipe()
    command = f'exec "$0" {FLAGS} --user-data-dir="$1" 3<&{to_read} 4>&{to_write}'
    with subprocess.Popen(
        ["bash", "-c", command, str(CHROMIUM), str(folder)],
        pass_fds=(to_read, to_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(to_read)
        os.close(to_write)
        try:
            yield Page(sending, receiving)
        finally:
            process.kill()
            os.close(sending)
            os.close(receiving)
