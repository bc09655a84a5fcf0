"""A hub on this machine: repositories of models, read and written by the hub's client, and of datasets, read."""

import base64
import hashlib
import http.server
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

WRITER, READER = "hf_writer-0123456789", "hf_reader-0123456789"  # tokens, and what they may do
ROLES = {WRITER: "write", READER: "read"}
LARGE = (".safetensors", ".npz", ".pt")


@dataclass
class Repo:
    """A repository: the files of each of its commits, the branch main, and other branches and tags."""

    private: bool = False
    gated: bool = False
    owner: str = "someone"
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    head: str = ""
    refs: dict[str, str] = field(default_factory=dict)  # commits of other branches and tags

    def at(self, revision: str | None) -> str:
        """The commit of a branch, a tag or a commit; an unknown revision is none of `commits`."""
        if revision in (None, "main"):
            return self.head
        return self.refs.get(revision, revision)

    def commit(self, files: dict[str, bytes]) -> str:
        """Adds a commit, and returns its id."""
        digest = hashlib.sha1(repr((self.head, sorted(files.items()))).encode())
        self.head = digest.hexdigest()
        self.commits[self.head] = files
        return self.head

    @property
    def files(self) -> dict[str, bytes]:
        """The newest state."""
        return self.commits[self.head]


class ModelHub(http.server.ThreadingHTTPServer):
    """Serves and takes repositories of models, and serves those of datasets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}  # by id
        self.objects: dict[str, bytes] = {}  # large files that were uploaded, by their SHA-256
        self.asked: list[str] = []  # method and path of every request
        self.failing: list[int] = []  # statuses that the next requests are answered with
        self.failing_reads = 0  # next requests for a file's bytes that are answered with 503
        self.sent: Counter[str] = Counter()  # bytes of each file

    @property
    def address(self) -> str:
        """What to set HF_ENDPOINT to."""
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """For processes that are to know no hub but this; its address is read at import."""
        own = {name: os.environ[name] for name in os.environ if not name.lower().endswith("_proxy")}
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
        places = {"HF_ENDPOINT": self.address, "HF_HOME": f"{home}/hf", "SAE_HOME": str(home)}
        return own | quiet | places | more

    def add(self, name: str, files: dict[str, bytes], **settings: Any) -> Repo:
        """Makes a repository."""
        self.repos[name] = Repo(**settings)
        self.repos[name].commit(files)
        return self.repos[name]

    def downloads(self) -> list[str]:
        """Files that were sent, in order."""
        return [
            path.split("/resolve/")[1].split("/", 1)[1]
            for path in self.asked
            if path.startswith("GET ") and "/resolve/" in path
        ]


@contextmanager
def serving() -> Iterator[ModelHub]:
    """A hub that serves until the context ends."""
    with ModelHub() as hub:
        threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
        yield hub
        hub.shutdown()


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def sibling(file: str, content: bytes) -> dict[str, Any]:
    """A file among a repository's, as the hub describes it where asked for blobs."""
    digest = hashlib.sha256(content).hexdigest()
    described = {"rfilename": file, "size": len(content), "blobId": digest}
    if file.endswith(LARGE):
        described["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
    return described


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ModelHub
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def json(self, document: Any, status: int = 200, **headers: str) -> None:
        headers = {"Content-Type": "application/json", **headers}
        self.answer(status, json.dumps(document).encode(), headers)

    def log_message(self, *args: object) -> None:
        pass

    def _route(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        if self.server.failing:
            return self._refuse(self.server.failing.pop(0), "", "the hub is busy")
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.role = ROLES.get(given)
        if given and self.role is None:
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        for method, pattern, answer in ROUTES:
            if self.command in method and (match := re.fullmatch(pattern, path)):
                return answer(self, *match.groups())
        return self._refuse(404, "EntryNotFound", f"nothing at {path}")

    do_GET = do_HEAD = do_POST = do_PUT = _route  # noqa: N815 (the server's names)

    def _repo(self, name: str, writing: bool = False) -> Repo | None:
        """The repository, or None where the request was refused."""
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and self.role is None):
            return self._refuse(404 if self.role else 401, "RepoNotFound", "Repository not found")
        if repo.gated and "/resolve/" in self.path:
            message = f"Access to model {name} is restricted"
            return self._refuse(403 if self.role else 401, "GatedRepo", message)
        if writing and (self.role != "write" or repo.owner != "someone"):
            return self._refuse(403, "", f"You don't have the rights to write to {name}")
        return repo

    def _info(self, name: str, revision: str | None = None) -> None:
        if (repo := self._repo(name)) is None:
            return None
        commit = repo.at(revision)
        if commit not in repo.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = sorted(repo.commits[commit].items())
        access = {"private": repo.private, "gated": repo.gated and "manual", "disabled": False}
        counts = {"tags": [], "downloads": 0, "likes": 0}
        siblings = [sibling(file, content) for file, content in files]
        return self.json({"id": name, "sha": commit, **access, **counts, "siblings": siblings})

    def _tree(self, name: str, revision: str) -> None:
        """All files, or those that are asked for."""
        if (repo := self._repo(name)) is None:
            return None
        files = repo.commits[repo.at(revision)]
        wanted = json.loads(self.body)["paths"] if self.body else files
        entries = [
            {"type": "file", "path": file, "size": len(content), "oid": file}
            for file, content in sorted(files.items())
            if file in wanted
        ]
        return self.json(entries)

    def _file(self, name: str, revision: str, file: str) -> None:
        if (repo := self._repo(name)) is None:
            return None
        commit = repo.at(revision)
        if commit not in repo.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if file not in repo.commits[commit]:
            return self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        content = repo.commits[commit][file]
        digest = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if file.endswith(LARGE):  # which the hub keeps elsewhere
            self.server.objects[digest] = content
            headers |= {
                "X-Linked-Size": str(len(content)),
                "X-Linked-Etag": f'"{digest}"',
                "Location": f"http://localhost:{self.server.server_port}/lfs/{digest}",
            }
            return self.answer(302, b"", headers)
        status = 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), int(match[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content, status = content[start : end + 1], 206
        if self.command == "GET" and self.server.failing_reads:
            self.server.failing_reads -= 1
            return self.answer(503, b"busy", {})
        self.server.sent[file] += len(content) if self.command == "GET" else 0
        return self.answer(status, content, headers)

    def _whoami(self) -> None:
        if self.role is None:
            return self._refuse(401, "", "Invalid username or password.")
        token = {"displayName": "t", "role": self.role}
        auth = {"type": "access_token", "accessToken": token}
        return self.json({"type": "user", "name": "someone", "orgs": [], "auth": auth})

    def _create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'someone'}/{asked['name']}"
        if self.role != "write" or not name.startswith("someone/"):
            message = f"You don't have the rights to create a model under the namespace of {name}"
            return self._refuse(403, "", message)
        url = f"{self.server.address}/{name}"
        if name in self.server.repos:
            return self.json({"error": "You already created this model repo", "url": url}, 409)
        private = asked.get("private") or asked.get("visibility") == "private"
        self.server.add(name, {}, private=private)
        return self.json({"url": url, "name": name, "id": name})

    def _validate(self) -> None:
        head = re.match(r"---\n(.*?)\n---\n", json.loads(self.body)["content"], re.DOTALL)
        sound = head is not None and isinstance(yaml.safe_load(head[1]), dict)
        message = [] if sound else [{"message": "metadata is not a mapping"}]
        self.json({"errors": message, "warnings": []}, 200 if sound else 400)

    def _preupload(self, name: str) -> None:
        if self._repo(name, writing=True) is None:
            return None
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        modes = {path: "lfs" if path.endswith(LARGE) else "regular" for path in paths}
        files = [{"path": path, "shouldIgnore": False, "uploadMode": modes[path]} for path in paths]
        return self.json({"files": files})

    def _batch(self, name: str) -> None:
        if self._repo(name, writing=True) is None:
            return None
        objects = json.loads(self.body)["objects"]
        for wanted in objects:
            if wanted["oid"] not in self.server.objects:
                upload = {"href": f"{self.server.address}/lfs/{wanted['oid']}", "header": {}}
                wanted["actions"] = {"upload": upload}
        return self.json({"transfer": "basic", "objects": objects})

    def _large(self, digest: str) -> None:
        if self.command == "PUT":
            if hashlib.sha256(self.body).hexdigest() != digest:
                return self._refuse(400, "", "the bytes are not those announced")
            self.server.objects[digest] = self.body
            return self.answer(200, b"", {})
        return self.answer(200, self.server.objects[digest], {"ETag": f'"{digest}"'})

    def _commit(self, name: str) -> None:
        if (repo := self._repo(name, writing=True)) is None:
            return None
        files = dict(repo.files)
        for line in map(json.loads, self.body.splitlines()):
            what, value = line["key"], line["value"]
            if what == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif what == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif what == "deletedFile":
                del files[value["path"]]
        commit = repo.commit(files)
        url = f"{self.server.address}/{name}/commit/{commit}"
        return self.json({"commitUrl": url, "commitOid": commit})

    def _refuse(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        headers = {"X-Error-Message": message} | (headers or {})
        if code:
            headers["X-Error-Code"] = code
        self.json({"error": message}, status, **headers)


REPO = "([^/]+/[^/]+)"
ROUTES = [
    (("GET",), "/api/whoami-v2", _Handler._whoami),
    (("GET", "HEAD"), f"/api/(?:models|datasets)/{REPO}", _Handler._info),
    (("GET", "HEAD"), f"/api/(?:models|datasets)/{REPO}/revision/(.+)", _Handler._info),
    (("GET", "HEAD"), f"/api/(?:models|datasets)/{REPO}/tree/([^/]+)", _Handler._tree),
    (("POST",), f"/api/datasets/{REPO}/paths-info/([^/]+)", _Handler._tree),
    (("GET", "HEAD"), f"/(?:datasets/)?{REPO}/resolve/([^/]+)/(.+)", _Handler._file),
    (("POST",), "/api/repos/create", _Handler._create),
    (("POST",), "/api/validate-yaml", _Handler._validate),
    (("POST",), f"/api/models/{REPO}/preupload/main", _Handler._preupload),
    (("POST",), f"/{REPO}.git/info/lfs/objects/batch", _Handler._batch),
    (("GET", "HEAD", "PUT"), "/lfs/([0-9a-f]{64})", _Handler._large),
    (("POST",), f"/api/models/{REPO}/commit/main", _Handler._commit),
]
