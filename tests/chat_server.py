"""A server of chat completions for tests, which answers by a function, and fails as it is told."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from saecli.base.options import arguments_of
from saecli.measure.functions import explain
from saecli.measure.judge import Server

MODEL = "judge-1"
Failure = tuple[int, str]  # status (0: dropped), body


class ChatServer(ThreadingHTTPServer):
    def __init__(self, answer: Callable[[list[str]], Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.answer = answer  # to a chat, the texts of its turns
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []  # Authorization of each
        self.failing: list[Failure] = []  # what the next requests are answered with instead
        self.wait: Callable[[], object] = lambda: None  # before an answer
        self.running = self.most = 0  # requests at once
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self._send(404, "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.asked.append(body)
            server.keys.append(self.headers["Authorization"])
            failure = server.failing.pop(0) if server.failing else None
            server.running += 1
            server.most = max(server.most, server.running)
        server.wait()
        with server.lock:
            server.running -= 1
        if failure is not None:
            self._send(*failure)
        elif self.path != "/v1/chat/completions" or body["model"] != MODEL:
            words = f"The model `{body['model']}` does not exist."
            self._send(404, json.dumps({"error": {"message": words, "code": 404}}))
        else:
            content = server.answer([turn["content"] for turn in body["messages"]])
            message = {"role": "assistant", "content": content}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            self._send(200, json.dumps({"id": "1", "model": MODEL, "choices": [choice]}))

    def _send(self, status: int, text: str) -> None:
        if not status:
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text.encode())


@contextmanager
def answering(answer: Callable[[list[str]], Any]) -> Iterator[ChatServer]:
    """A server that serves until the context ends."""
    with ChatServer(answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def asked(url: str, **settings: Any) -> Server:
    """A server of `MODEL`, with the defaults of `explain`."""
    defaults = {name: option.default for name, option in arguments_of(explain).items()}
    values = defaults | {"endpoint": url, "model_name": MODEL} | settings
    return Server(**{field.name: values[field.name] for field in fields(Server)})
