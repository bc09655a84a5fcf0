"""A hub on this machine: one dataset of Parquet files, served as the Hugging Face hub does, and failing on demand."""

import http.server
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DATASET = "some/texts"
COMMIT = "c0ffee" * 6 + "c0de"


class Answering(http.server.BaseHTTPRequestHandler):
    """Handles a request by one call of `answer`."""

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


class FakeHub(http.server.ThreadingHTTPServer):
    """Serves the files of a folder as the dataset `some/texts`.

    Args:
        folder: the dataset's files.

    Attributes:
        failing_reads: the next requests for bytes of files that are answered with 503.
        sent: bytes of each file that were sent.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.failing_reads = folder, 0
        self.sent: Counter[str] = Counter()

    @property
    def address(self) -> str:
        """What to set HF_ENDPOINT to."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(folder: Path) -> Iterator[FakeHub]:
    """A hub that serves until the context ends."""
    with FakeHub(folder) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


class _Handler(Answering, http.server.BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(f"/datasets/{DATASET}/resolve/[^/]+/(.*)", path):
            return self._file(self.server.folder / match[1])
        api = f"/api/datasets/{DATASET}"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            return self._json({"id": DATASET, "sha": COMMIT, "private": False, "gated": False, "disabled": False,
                               "tags": [], "downloads": 0, "likes": 0,
                               "siblings": [{"rfilename": entry["path"]} for entry in self._entries()]})
        if re.fullmatch(f"{api}/tree/[^/]+", path):
            return self._json(self._entries())
        return self._missing()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = unquote(urlsplit(self.path).path)
        if re.fullmatch(f"/api/datasets/{DATASET}/paths-info/[^/]+", path):
            wanted = json.loads(body)["paths"]
            return self._json([entry for entry in self._entries() if entry["path"] in wanted])
        return self._missing()

    def _entries(self) -> list[dict[str, Any]]:
        return [{"type": "file", "path": path.name, "size": path.stat().st_size, "oid": path.name}
                for path in sorted(self.server.folder.iterdir())]

    def _file(self, path: Path) -> None:
        if not path.exists():
            return self._missing()
        content, status = path.read_bytes(), 200
        headers = {"ETag": f'"{path.name}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), int(match[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content, status = content[start : end + 1], 206
        if self.command == "GET":
            if self.server.failing_reads:
                self.server.failing_reads -= 1
                return self.answer(503, b"busy", {})
            self.server.sent[path.name] += len(content)
        return self.answer(status, content, headers)

    def _json(self, document: Any) -> None:
        self.answer(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _missing(self) -> None:
        code = "EntryNotFound" if DATASET in self.path else "RepoNotFound"
        self.answer(404, b"", {"X-Error-Code": "RevisionNotFound" if "/revision/" in self.path else code})
