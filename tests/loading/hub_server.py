"""A server on the loopback address that answers like the Hugging Face Hub, as far as downloading a model needs it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c" * 40
LARGE = (".safetensors", ".gguf", "tokenizer.json")  # in large file storage: on another host, named by their SHA-256


@dataclass
class Hub(ThreadingHTTPServer):
    """`repositories` maps names to folders; `answers` maps the beginning of a path to a status and an error code.

    `requests` records method, path and headers. The first `cuts` answers with a body end after `cut_bytes`.
    """

    repositories: dict[str, Path] = field(default_factory=dict)
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    cuts: int = 0
    cut_bytes: int = 0
    ranges: bool = True
    login_page: bool = False  # in place of JSON, as captive portals do
    commit: str = COMMIT
    most_bytes: int = 1 << 40  # of each file, without an error

    def __post_init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.storage = ThreadingHTTPServer(("127.0.0.1", 0), _Answer)  # another port is another origin, to which no token goes
        self.storage.hub = self.hub = self

    def __enter__(self) -> Hub:
        for server in (self, self.storage):
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self, self.storage):
            server.shutdown()
            server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def sent(self, name: str) -> list[str]:
        """The ranges in which the bytes of a file were requested."""
        return [h.get("range", "all") for method, path, h in self.requests if method == "GET" and path == f"/storage/{name}"]


def entry(folder: Path, path: Path) -> dict[str, Any]:
    data, name = path.read_bytes(), path.relative_to(folder).as_posix()
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    found: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git}
    if name.endswith(LARGE):
        found["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return found


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.hub.requests.append((self.command, path, {name.lower(): value for name, value in self.headers.items()}))
        for beginning, (status, code) in self.server.hub.answers.items():
            if path.startswith(beginning):
                return self._send(status, b"", {"X-Error-Code": code})
        if info := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            return self._info(info[1], info[2], body)
        if file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return self._file(file[1], file[2], body)
        if path.startswith("/storage/"):
            return self._bytes(path, body)
        return self._send(404, b"", {})

    def _info(self, name: str, revision: str, body: bool) -> None:
        folder = self.server.hub.repositories.get(name)
        if folder is None:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT, self.server.hub.commit):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = [entry(folder, path) for path in sorted(folder.rglob("*")) if path.is_file()]
        about = {"id": name, "modelId": name, "sha": self.server.hub.commit, "siblings": files}
        text = b"<html>" if self.server.hub.login_page else json.dumps(about).encode()
        return self._send(200, text if body else b"", {})

    def _file(self, name: str, file: str, body: bool) -> None:
        folder = self.server.hub.repositories[name]
        about = entry(folder, folder / file)
        etag = about["lfs"]["sha256"] if "lfs" in about else about["blobId"]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}
        if "lfs" not in about:
            return self._send(200, (folder / file).read_bytes(), headers, body)
        headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(about["size"])}
        return self._send(
            302,
            b"",
            headers | {"Location": f"http://127.0.0.1:{self.server.hub.storage.server_address[1]}/storage/{name}/{file}"},
        )

    def _bytes(self, path: str, body: bool) -> None:
        owner, name, file = path.removeprefix("/storage/").split("/", 2)
        data = (self.server.hub.repositories[f"{owner}/{name}"] / file).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not asked or not self.server.hub.ranges:
            return self._send(200, data, {}, body)
        start, stop = int(asked[1]), min(int(asked[2]) + 1, self.server.hub.most_bytes)
        return self._send(206, data[start:stop], {"Content-Range": f"bytes {start}-{int(asked[2])}/{len(data)}"}, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool = True) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body:
            return
        if self.path.startswith("/storage/") and self.server.hub.cuts:
            self.server.hub.cuts -= 1
            self.wfile.write(data[: self.server.hub.cut_bytes])
            self.wfile.flush()
            self.connection.shutdown(2)
            self.close_connection = True
        else:
            self.wfile.write(data)
