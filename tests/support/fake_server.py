"""This program serves a FakeEngine: python fake_server.py ENDPOINT JSON, where JSON has engine, limits, log."""

import faulthandler
import json
import logging
import signal
import sys
from contextlib import ExitStack

from fake_engine import FakeCodec, FakeEngine

from lowlat.ipc.limits import Limits
from lowlat.ipc.server import Server
from lowlat.ipc.signals import ending_signals


def main() -> int:
    endpoint, options = sys.argv[1], json.loads(sys.argv[2])
    faulthandler.enable()
    sys.setswitchinterval(0.0005)  # as `lowlat serve` does
    engine = options.get("engine", {})
    faults = {int(token): fault for token, fault in engine.pop("faults", {}).items()}
    with ExitStack() as stack:
        if options.get("log"):
            from lowlat.serving.logs import serving_log

            stack.enter_context(serving_log(options["log"]))
        else:
            logging.basicConfig(level=logging.INFO)
        server = Server(
            lambda: FakeEngine(faults=faults, **engine), FakeCodec(), endpoint, Limits(**options.get("limits", {}))
        )
        server.start()
        for number in ending_signals():  # until `run` takes them
            signal.signal(number, lambda *_: server.drain())
        print(json.dumps({"endpoint": server.endpoint}), flush=True)
        return server.run()


if __name__ == "__main__":
    sys.exit(main())
