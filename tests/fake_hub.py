"""A hub on this machine: one dataset of Parquet files, served as the Hugging Face hub does, and failing on demand."""

import http.server
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

DATASET = "some/texts"
COMMIT = "c0ffee" * 6 + "c0de"


class Answering(http.server.BaseHTTPRequestHandler):
    """Handles requests by calls of `answer` and `json`, without a log."""

    protocol_version = "HTTP/1.1"

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def json(self, document: Any, status: int = 200, **headers: str) -> None:
        self.answer(status, json.dumps(document).encode(), {"Content-Type": "application/json", **headers})

    def log_message(self, *args: object) -> None:
        pass


class Hub(http.server.ThreadingHTTPServer):
    """A server on this machine."""

    def __init__(self, handler: type[Answering]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def address(self) -> str:
        """What to set HF_ENDPOINT to."""
        return f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def serving(self) -> Iterator[Self]:
        """Serves until the context ends."""
        with self:
            threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
            yield self
            self.shutdown()


class FakeHub(Hub):
    """Serves the files of a folder as the dataset `some/texts`; counts the bytes `sent` of each, and answers the next
    `failing_reads` requests for bytes with 503."""

    def __init__(self, folder: Path) -> None:
        super().__init__(_Handler)
        self.folder, self.failing_reads = folder, 0
        self.sent: Counter[str] = Counter()


def serving(folder: Path) -> AbstractContextManager[FakeHub]:
    """A hub that serves until the context ends."""
    return FakeHub(folder).serving()


class _Handler(Answering):
    server: FakeHub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(f"/datasets/{DATASET}/resolve/[^/]+/(.*)", path):
            return self._file(self.server.folder / match[1])
        api = f"/api/datasets/{DATASET}"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            return self.json({"id": DATASET, "sha": COMMIT, "private": False, "gated": False, "disabled": False,
                               "tags": [], "downloads": 0, "likes": 0,
                               "siblings": [{"rfilename": entry["path"]} for entry in self._entries()]})
        if re.fullmatch(f"{api}/tree/[^/]+", path):
            return self.json(self._entries())
        return self._missing()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = unquote(urlsplit(self.path).path)
        if re.fullmatch(f"/api/datasets/{DATASET}/paths-info/[^/]+", path):
            wanted = json.loads(body)["paths"]
            return self.json([entry for entry in self._entries() if entry["path"] in wanted])
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

    def _missing(self) -> None:
        code = "EntryNotFound" if DATASET in self.path else "RepoNotFound"
        self.answer(404, b"", {"X-Error-Code": "RevisionNotFound" if "/revision/" in self.path else code})
