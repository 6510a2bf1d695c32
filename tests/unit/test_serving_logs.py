"""The server's log: JSON that parses, lines that cannot be forged, and nobody who ever waits for a reader."""

import json
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from lowlat.serving.logs import BURST, ServingHandler, formatter, serving_log

logger = logging.getLogger("lowlat.somewhere")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def written(log: Path, log_format: str = "json") -> list[str]:
    with log.open("wb") as file, serving_log(log_format, file.fileno()):
        logger.info("a client %s came\nwarning: forged", "x", extra={"client": "c1", "uid": 7})
        try:
            raise ValueError("broken")
        except ValueError:
            logger.exception("it failed")
    return log.read_text().splitlines()


def test_json_lines_parse_and_hold_the_records_own_fields(log: Path) -> None:
    first, second = [json.loads(line) for line in written(log)]
    assert first["message"] == "a client x came\nwarning: forged" and first["level"] == "info"
    assert first["client"] == "c1" and first["uid"] == 7 and first["logger"] == "lowlat.somewhere"
    assert first["time"].endswith("Z") and "ValueError: broken" in second["traceback"]


def test_a_line_of_text_stays_one_line(log: Path) -> None:
    lines = written(log, "text")
    assert lines[0].endswith("info: a client x came\\nwarning: forged client='c1' uid=7")
    assert lines[1].endswith("error: it failed") and lines[-1] == "ValueError: broken"


def test_a_kind_of_record_that_comes_too_often_is_counted_instead(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("lowlat.serving.logs.time.monotonic", lambda: now)
    with log.open("wb") as file:
        handler = ServingHandler(file.fileno())
        handler.setFormatter(formatter("json"))
        for round_ in range(2):
            for number in range(100):
                handler.handle(logging.LogRecord("lowlat", logging.WARNING, "a.py", 1, "often %d", (number,), None))
            handler.handle(logging.LogRecord("lowlat", logging.WARNING, "a.py", 2 + round_, "seldom", (), None))
            now += 60.0
        monkeypatch.undo()
        handler.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["message"] for line in lines].count("seldom") == 2
    often = [line for line in lines if line["message"].startswith("often")]
    assert len(often) == 2 * BURST
    assert [line["suppressed"] for line in often if "suppressed" in line] == [100 - BURST]


def test_an_unread_pipe_stalls_nobody() -> None:
    reader, writer = os.pipe()
    handler = ServingHandler(writer, max_lines=50)
    handler.setFormatter(formatter("text"))
    start = time.monotonic()
    for number in range(1000):
        handler.handle(logging.LogRecord("lowlat", logging.INFO, f"{number}.py", 1, "x" * 8000, (), None))
    assert time.monotonic() - start < 5.0
    assert handler.num_dropped > 0
    start = time.monotonic()
    handler.close()
    assert time.monotonic() - start < 3.0
    os.close(reader)  # the writer thread ends at the broken pipe
    for thread in threading.enumerate():
        if thread.name == "lowlat-log":
            thread.join(5.0)
    os.close(writer)


def test_the_handlers_before_come_back(log: Path) -> None:
    package = logging.getLogger("lowlat")
    before = package.handlers[:], package.level, package.propagate
    written(log)
    assert (package.handlers, package.level, package.propagate) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "lowlat-log"]
