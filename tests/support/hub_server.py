"""A hub on the loopback: the few endpoints that huggingface_hub asks for one model, and what can go wrong with them."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

__all__ = ["COMMIT", "DEMO", "Hub", "hub_here", "hub_running"]

COMMIT = "c0ffee" * 6 + "beef"
DEMO = Path(__file__).resolve().parents[2] / "lowlat" / "demo"


@dataclass
class Hub:
    """The repositories by name, and how requests are answered; `asked` has those that came, as `METHOD path range`."""

    url: str = ""
    repositories: dict[str, Path] = field(default_factory=dict)
    token: str | None = None  # whoever does not show it is refused
    gated: bool = False
    page: bytes | None = None  # in place of what the API says, as a portal of a network would
    silent: threading.Event = field(default_factory=threading.Event)  # unset: requests wait
    cut: int | None = None  # the next large file breaks off after so many bytes
    etag: str | None = None  # in place of a file's own hash
    commit: str = COMMIT
    headers: dict[str, str] = field(default_factory=dict)  # further ones of answers about files
    listed: list[dict[str, Any]] = field(default_factory=list)  # further files that the API lists
    num_added: int = 0  # bytes that a file is longer than the API lists
    asked: list[str] = field(default_factory=list)
    root: Path = Path()

    def constants(self, folder: Path) -> dict[str, object]:
        """The constants of huggingface_hub that make it ask here, and keep what it gets in a folder."""
        return {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": f"{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
            "HF_HUB_CACHE": str(folder / "cache"),
            "HF_TOKEN_PATH": str(folder / "token"),
            "HF_HUB_OFFLINE": False,
        }

    def add(self, name: str, *folders: Path, **files: str) -> Path:
        """A repository with the files of some folders, and further ones by name (`_` for the dot)."""
        own = self.repositories[name] = Path(self.root, name)
        for folder in folders:
            shutil.copytree(folder, own, dirs_exist_ok=True)
        own.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (own / file.replace("_", ".")).write_text(text)
        return own

    def fetched(self, ending: str) -> list[str]:
        """The GET requests of files with that ending."""
        return [line for line in self.asked if line.startswith("GET") and line.split()[1].endswith(ending)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/") or "/resolve/" in path:  # not what the library asks about itself
            hub.asked.append(f"{self.command} {path} {self.headers.get('range', '')}".strip())
        hub.silent.wait(30)
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        revision = "/".join(parts[5:]) if api else parts[3] if len(parts) > 3 else ""
        if hub.token is not None and self.headers.get("authorization") != f"Bearer {hub.token}":
            self._refuse(401, "Invalid username or password.")
        elif name not in hub.repositories:
            self._refuse(404, "Repository not found", "RepoNotFound")
        elif (revision or "main") not in ("main", "v1", COMMIT):
            self._refuse(404, "Invalid rev id", "RevisionNotFound")
        elif api and hub.page is not None:
            self._send(200, hub.page, body=body)
        elif api:
            files = sorted(file for file in hub.repositories[name].rglob("*") if file.is_file())
            listed = [
                {"rfilename": str(file.relative_to(hub.repositories[name])), "size": file.stat().st_size}
                for file in files
            ]
            listed += hub.listed
            self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": listed}).encode(), body=body)
        elif hub.gated:
            self._refuse(403, "Access to this model is restricted", "GatedRepo")
        else:
            self._send_file(hub.repositories[name] / "/".join(parts[4:]), body=body)

    def _send_file(self, file: Path, *, body: bool) -> None:
        if not file.is_file():
            self._refuse(404, "Entry not found", "EntryNotFound")
            return
        data, status, extra = file.read_bytes() + bytes(self.hub.num_added), 200, dict(self.hub.headers)
        extra["ETag"] = f'"{sha256(data).hexdigest()}"' if self.hub.etag is None else self.hub.etag
        asked = self.headers.get("range", "")
        if asked.startswith("bytes="):
            first, _, last = asked[6:].partition("-")
            end = min(int(last or len(data)), len(data) - 1)
            extra["Content-Range"] = f"bytes {first}-{end}/{len(data)}"
            data, status = data[int(first) : end + 1], 206
        self._send(status, data, body=body, **extra)

    def _send(self, status: int, data: bytes, *, body: bool, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": self.hub.commit, "Accept-Ranges": "bytes", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body:
            return
        cut = self.hub.cut
        if cut is not None and len(data) > cut:
            self.hub.cut, self.close_connection = None, True
            data = data[:cut]
        with suppress(ConnectionError):  # who reads a header alone goes away amid the answer
            self.wfile.write(data)

    def _refuse(self, status: int, message: str, code: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Message", message)
        self.send_header("X-Repo-Commit", self.hub.commit)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def hub_running(root: Path) -> Iterator[Hub]:
    """A hub with no repository yet; its files lie below `root`."""
    hub = Hub(root=root)
    hub.silent.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.silent.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def hub_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the bundled pair, where huggingface_hub looks for one in this process, and an empty cache."""
    from huggingface_hub import constants

    with hub_running(folder / "hub") as hub:
        hub.add("some/target", DEMO / "target", model_bin="a pickle", README_md="much text")
        hub.add("some/head", DEMO / "head")
        for name, value in hub.constants(folder).items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub
