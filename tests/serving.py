"""A server of pages in a thread."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import uvicorn
from homes import make_run

import saecli
from saecli.base.console import Silent
from saecli.base.home import Home
from saecli.model import TINY_GEMMA2
from saecli.show.serve.app import application
from saecli.show.serve.workbench import Workbench

ORIGIN = {"model": TINY_GEMMA2, "layer": 2, "site": "resid_post"}


@dataclass
class Server:
    home: Path
    port: int
    bench: Workbench

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **more: Any) -> requests.Response:
        return requests.get(f"{self.url}/{path}", timeout=60, **more)

    def post(self, path: str, asked: Any, **more: Any) -> requests.Response:
        headers = {"Content-Type": "application/json"}
        body = json.dumps(asked)
        return requests.post(f"{self.url}/api/{path}", body, headers=headers, timeout=60, **more)

    def raw(self, *words: Any) -> tuple[int, bytes]:
        """The status and body of a request as it is written."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(*words)
            with connection.getresponse() as response:
                return response.status, response.read()

    def events(self, asked: Any) -> list[dict[str, Any]]:
        text = self.post("steer", asked).text
        return [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]


@contextmanager
def served(home: Path, token: str | None = None, known_as: int | None = None) -> Iterator[Server]:
    """The bundled SAE, and a run of the home with the same weights.

    Args:
        known_as: the port in addresses, if another than the server listens at.
    """
    if not (home / "activations" / "rows").exists():
        saecli.extract(TINY_GEMMA2, layer=2, rows=4000, name="rows", home=home)
        sae = saecli.load_sae(TINY_GEMMA2, home)
        make_run(home, "own", sae, origin=ORIGIN)
    bench = Workbench(Home.at(home), [TINY_GEMMA2, "own"], None, "rows", "cpu", Silent())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        config = uvicorn.Config(application(bench, known_as or port, token), log_level="warning")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield Server(home, port, bench)
        finally:
            server.should_exit = True
            thread.join()
