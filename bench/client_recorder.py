"""This module has a proxy that records clients' requests, a file a client, without keys, for tests that replay them."""

import http.client
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Recorder", "recorded"]

KEPT_HEADERS = ("accept", "content-type", "openai-beta", "user-agent")  # and those that begin as follows
KEPT_PREFIXES = ("x-stainless-helper", "x-stainless-lang", "x-stainless-package", "x-stainless-retry")
MAX_BYTES = 8192  # of a body; a longer one is no small request
MAX_A_CASE = 4  # requests; further ones say the same again


class Recorder:
    """The requests that were sent, in order, by case; `write` puts it into a client's file.

    folder  where the files are
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def note(self, case: str, method: str, path: str, headers: Mapping[str, str], body: bytes, status: int) -> None:
        """Keep a request, unless it is long, was seen in this case, or follows many of the same case."""
        if len(body) > MAX_BYTES:
            return
        kept = {
            name.lower(): value
            for name, value in headers.items()
            if name.lower() in KEPT_HEADERS or name.lower().startswith(KEPT_PREFIXES)
        }
        request = {
            "case": case,
            "method": method,
            "path": path,
            "status": status,
            "headers": dict(sorted(kept.items())),
        }
        if body:
            request["body"] = json.loads(body)
        with self._lock:
            if request not in self._seen and sum(seen["case"] == case for seen in self._seen) < MAX_A_CASE:
                self._seen.append(request)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the file of the client whose cases these rows are, and forget what was seen.

        Headers that all its requests share stand once. A request of a case that failed says so: `fails`.
        """
        requests, self._seen = self._seen, []
        by_segment = {_segment(str(row["tried"])): row for row in rows}
        names = set[str]().union(*(request["headers"] for request in requests))
        shared = {}
        for name in sorted(names):
            values = {request["headers"].get(name) for request in requests}
            if len(values) == 1:
                (shared[name],) = values
        for request in requests:
            request["headers"] = {name: value for name, value in request["headers"].items() if name not in shared}
            row = by_segment[request["case"]]
            request["case"] = row["tried"]
            if not row["ok"] and request["status"] >= 400:
                request["fails"] = row["why"]
        client = str(rows[0]["client"])
        said = {"client": client, "version": rows[0]["version"], "headers": shared}
        lines = ",\n".join(json.dumps(request, ensure_ascii=False) for request in requests)
        head = json.dumps(said, indent=1)[:-2]
        self._folder.mkdir(parents=True, exist_ok=True)
        text = f'{head},\n "requests": [\n{lines}\n]}}\n'
        (self._folder / f"{client}.json").write_text(text, encoding="utf-8")


def _segment(case: str) -> str:
    """A case's name as the first segment of an address."""
    return case.replace(" ", "_").replace(",", "")


@contextmanager
def recorded(recorder: Recorder, upstream: str) -> Iterator[str]:
    """A proxy before `upstream`; it takes /CASE/... for /..., and gives every piece of an answer on as it comes."""
    target = urlsplit(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._forward()

        do_POST = do_HEAD = do_OPTIONS = do_GET

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def _forward(self) -> None:
            case, _, path = self.path[1:].partition("/")
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")
            }
            connection = http.client.HTTPConnection(str(target.hostname), target.port, timeout=300)
            try:
                connection.request(self.command, f"/{path}", body, headers)
                answer = connection.getresponse()
                recorder.note(case, self.command, f"/{path}", headers, body, answer.status)
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in ("connection", "transfer-encoding"):
                        self.send_header(name, value)
                self.send_header("connection", "close")
                self.close_connection = True
                self.end_headers()
                while piece := answer.read1():
                    self.wfile.write(piece)
                    self.wfile.flush()
            finally:
                connection.close()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
