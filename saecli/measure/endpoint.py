"""A language model behind a server of OpenAI's chat completions: vLLM, llama.cpp, `transformers serve`, or hosted.

Answers are kept in a file of JSON lines, by a hash of the request: a killed command goes on where it was, a second one
sends nothing. Keys come from the environment, and are neither kept nor printed.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from threading import Event, Lock
from typing import Any
from urllib.parse import urlsplit

from ..base.console import Listener
from ..base.documents import parse_json
from ..base.errors import ConfigError, ModelError, one_line
from ..base.files import to_json
from ..base.network import is_passing, why_silent
from ..base.words import counted

ANSWERS = "answers.jsonl"
BUSY_SECONDS = 60  # that a server may take to say that it is there
TIMEOUT = 300.0  # seconds, of a request
WAITS: tuple[float, ...] = (1, 2, 4, 8, 16, 32)  # seconds before it is sent again
TOKEN_CHARACTERS = 4  # of English, about
Chat = tuple[str, ...]  # turns: the user's, the model's, the user's ...
Ask = Callable[[Sequence[Chat]], Sequence[str]]  # returns answers


@dataclass(frozen=True)
class Server:
    """See the options of `explain`."""

    endpoint: str | None
    model_name: str | None
    concurrency: int
    max_tokens: int
    dry_run: bool

    def __post_init__(self) -> None:
        is_url = False
        with suppress(ValueError):  # a port that is no number up to 65535, an open bracket
            url = urlsplit(self.endpoint or "")
            is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        if self.endpoint is None:
            if self.model_name is not None or self.dry_run:
                raise ConfigError("--model-name and --dry-run need --endpoint; name a server")
        elif not is_url:
            raise ConfigError(
                f"--endpoint must be a URL such as http://localhost:8000/v1, got {self.endpoint!r}"
            )
        elif not self.model_name:
            raise ConfigError("--endpoint needs --model-name; name a model that it serves")

    @property
    def address(self) -> str:
        """The endpoint without a user's name and password, to be shown and kept."""
        url = urlsplit(self.endpoint or "")
        return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl().rstrip("/")

    def request(self, chat: Chat) -> dict[str, Any]:
        roles = cycle(("user", "assistant"))  # none of the system's, which some templates lack
        messages = [{"role": next(roles), "content": turn} for turn in chat]
        settings = {"temperature": 0.0, "max_tokens": self.max_tokens}
        return {"model": self.model_name, "messages": messages, **settings}

    def hash(self, chat: Chat) -> str:
        asked = {"endpoint": self.address, **self.request(chat)}
        return hashlib.sha256(to_json(asked).encode()).hexdigest()


class Endpoint:
    def __init__(self, server: Server, answers: Path, listener: Listener) -> None:
        self.server, self._path, self.listener = server, answers, listener
        self._key = os.environ.get("OPENAI_API_KEY", "").strip()
        self._lock, self._stopping = Lock(), Event()
        self.answers: dict[str, str] = {}  # by the hash of the request
        for line in answers.read_bytes().splitlines() if answers.is_file() else []:
            with suppress(ValueError):  # a line that a kill tore
                self.answers |= parse_json(line, dict[str, str])

    def planned(self, work: Callable[[Ask], object]) -> dict[str, int]:
        """What `work` would ask: requests, those `kept`, the others' tokens: read (about), written (at most)."""
        sizes: dict[str, int] = {}

        def ask(chats: Sequence[Chat]) -> list[str]:
            hashes = [self.server.hash(chat) for chat in chats]
            sizes.update(zip(hashes, (sum(map(len, chat)) for chat in chats), strict=True))
            return [self.answers.get(hash, hash) for hash in hashes]  # about as long as labels

        work(ask)
        new = [size for hash, size in sizes.items() if hash not in self.answers]
        return {
            "requests": len(sizes),
            "kept": len(sizes) - len(new),
            "tokens_read": sum(new) // TOKEN_CHARACTERS,
            "tokens_written": len(new) * self.server.max_tokens,
        }

    def ask(self, chats: Sequence[Chat]) -> list[str]:
        """Answers; ModelError if the server does not answer, or refuses."""
        asked = {self.server.hash(chat): chat for chat in chats}
        new = {hash: chat for hash, chat in asked.items() if hash not in self.answers}
        if new:
            self._ask_server(new)
        if empty := sum(not self.answers[hash] for hash in new):
            self.listener.warn(
                f"{counted(empty, 'answer')} of {len(new):,} from {self.server.address} had no text: a model that "
                f"reasons first may have used up --max-tokens {self.server.max_tokens}; give more, and run it again"
            )
        return [self.answers[self.server.hash(chat)] for chat in chats]

    def _ask_server(self, chats: Mapping[str, Chat]) -> None:
        self._stopping.clear()
        server = self.server
        silence = why_silent(str(server.endpoint), BUSY_SECONDS)
        if silence is not None:
            raise ModelError(
                f"cannot reach {server.address}: {silence}; start the server, or check --endpoint"
            )
        with (
            self.listener.progress("asking", len(chats), "requests") as show,
            ThreadPoolExecutor(server.concurrency) as pool,
        ):
            asked = [pool.submit(self._answer, *item) for item in chats.items()]
            try:
                for done, future in enumerate(as_completed(asked), 1):
                    future.result()
                    show(done)
            except BaseException:
                self._stopping.set()  # the pool then ends with the answers under way, which are kept
                raise

    def _answer(self, hash: str, chat: Chat) -> None:
        import requests

        for wait in (*WAITS, None):
            if self._stopping.is_set():
                return
            try:
                response = requests.post(
                    f"{str(self.server.endpoint).rstrip('/')}/chat/completions",
                    json=self.server.request(chat),
                    auth=None if urlsplit(self.server.endpoint).username else self._authorised,
                    timeout=TIMEOUT,
                )
                response.raise_for_status()
                break
            except OSError as error:  # as all errors of requests are
                if wait is None or not is_passing(error):
                    self._stopping.set()
                    raise self._refusal(error) from error
                self._stopping.wait(wait)
        answer = self._text_of(response)
        with self._lock:
            self.answers[hash] = answer
            if answer:  # an empty one is asked for again by the next command
                # In one write, which begins the line: a kill or another process cannot mix it with the one before.
                with self._path.open("ab", buffering=0) as file:
                    file.write(f"\n{to_json({hash: answer})}".encode())

    def _authorised(self, request: Any) -> Any:
        """Adds the key; given nothing at all, requests would send netrc's password for the host."""
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def _text_of(self, response: Any) -> str:
        try:
            text = response.json()["choices"][0]["message"]["content"] or ""
            return parse_json(to_json(text), str)
        except (ValueError, TypeError, LookupError) as error:
            self._stopping.set()
            raise ModelError(
                f"{self.server.address} answered with no chat completion: expected JSON with choices, got "
                f"{self._shown(response.text or 'nothing')}; check --endpoint, which often ends in /v1"
            ) from error

    def _shown(self, words: str) -> str:
        """The beginning of a server's words, without secrets."""
        for secret, shown in ((self._key, "..."), (str(self.server.endpoint), self.server.address)):
            words = words.replace(secret or "\0", shown)
        return one_line(ValueError(words))

    def _refusal(self, error: OSError) -> ModelError:
        server, response = self.server, getattr(error, "response", None)
        words = str(error) if response is None else f"{response.status_code} {response.text}"
        said = self._shown(words)
        if is_passing(error):
            return ModelError(
                f"{server.address} gave no answer in {counted(len(WAITS) + 1, 'attempt')}: {said}; run the same "
                f"command again to go on, {counted(len(self.answers), 'answer')} are kept"
            )
        return ModelError(
            f"{server.address} refused a request to {server.model_name}: {said}; check --endpoint, "
            "--model-name and OPENAI_API_KEY"
        )
