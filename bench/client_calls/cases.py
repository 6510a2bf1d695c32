"""The cases that a client is put through; each case's end is a line of JSON on stdout."""

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import version
from types import FrameType

__all__ = ["KEY", "MODEL", "Case", "expect", "run", "url_of"]

MODEL = os.environ.get("LOWLAT_CLIENTS_MODEL", "")
KEY = os.environ.get("LOWLAT_API_KEY", "")
SECONDS = 600  # for one case: two cores decode slowly
WHY = 400  # characters of a failure that are shown

Case = Callable[[str], None]  # given the address that the client is told to use


def url_of(case: str) -> str:
    """The address for a case: a recorder tells cases apart by it."""
    return os.environ["LOWLAT_CLIENTS_URL"].replace("{case}", case.replace(" ", "_").replace(",", ""))


def expect(what: object, *, why: str) -> None:
    """Fail the case unless `what` is true."""
    if not what:
        raise AssertionError(why)


def run(distribution: str, cases: Mapping[str, Case]) -> None:
    """Run the cases one after another and print a line for each: client, version, tried, ok, why, seconds."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end after {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    only = os.environ.get("LOWLAT_CLIENTS_CASE", "")
    for tried, case in cases.items():
        if only not in tried:
            continue
        why, began = "", time.monotonic()
        signal.alarm(SECONDS)
        try:
            case(url_of(tried))
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"[:WHY].replace("\n", " ")
        finally:
            signal.alarm(0)
        seconds = round(time.monotonic() - began, 1)
        line = {"client": distribution, "version": version(distribution), "tried": tried, "ok": not why, "why": why}
        print(json.dumps({**line, "seconds": seconds}), flush=True)
