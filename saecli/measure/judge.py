"""Labels of latents by a language model, and scores of labels by it: detection and fuzzing.

    detection   given a label, does the latent fire in an excerpt? In some it does; in others it is silent: random, or
                `near`, where a latent near it fires
    fuzzing     given a label, does the latent fire on the marked tokens of an excerpt? In half of the
                excerpts it does; in the others, an equal number is marked at random

A score is a balanced accuracy: 0.5 for a judge that guesses. An answer that is no list of verdicts is counted, and left
out. Scored on the same excerpts are the judge's label, the rule's, and, as the floor, the judge's of another latent.

Source: Paulo et al., "Automatically Interpreting Millions of Features in Large Language Models" (arXiv:2410.13928).

The judge is behind a server of OpenAI's chat completions: vLLM, llama.cpp, `transformers serve`, or hosted. Answers are
kept in a file of JSON lines, by a hash of the request: a killed command goes on where it was, a second one sends
nothing. Keys come from the environment, and are neither kept nor printed.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from threading import Event, Lock
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ..base.console import Listener
from ..base.errors import ConfigError, ModelError, one_line
from ..base.files import parse_json, to_json
from ..base.machine import is_passing, why_silent
from ..base.words import counted
from .excerpts import Excerpt, LatentExcerpts
from .labels import balanced_accuracy, derange

ANSWERS = "answers.jsonl"
BUSY_SECONDS = 60  # that a server may take to say that it is there
TIMEOUT = 300.0  # seconds, of a request
WAITS: tuple[float, ...] = (1, 2, 4, 8, 16, 32)  # seconds before it is sent again
TOKEN_CHARACTERS = 4  # of English, about
Chat = tuple[str, ...]  # turns: the user's, the model's, the user's ...
Ask = Callable[[Sequence[Chat]], Sequence[str]]  # returns answers
QUESTION_EXCERPTS = 5  # most excerpts of a question
LABEL_WORDS = 15
JUDGED_LABELS = ("model", "rule", "model, shuffled")
ANSWER_COUNTS = ("answers", "nonsense")
JUDGED_SCORES = {  # the kinds of excerpts for which yes is right, and no
    "detection": ("firing", "silent"),
    "detection_near": ("firing", "near"),
    "fuzzing": ("right", "wrong"),
}

LABEL_PROMPT = f"""\
A language model has a feature that is active on some tokens and silent on all others. Below are excerpts of texts in \
which it is active. Its active tokens stand between << and >>, and are listed after each excerpt with their strength, \
at most 10.

{{excerpts}}

What do the active tokens have in common, or the words before them? Be as specific as the excerpts allow. Answer with \
one line of at most {LABEL_WORDS} words, in the form
LABEL: what the feature is active on"""

DETECTION_PROMPT = """\
A feature of a language model is active on: {label}

Below are {count} excerpts of texts. Which of them have a token on which that feature is active?

{excerpts}

Answer with nothing but a JSON list of {count} numbers, one for each excerpt in order: 1 if the feature is active in \
it, 0 if it is not."""

FUZZING_PROMPT = """\
A feature of a language model is active on: {label}

Below are {count} excerpts of texts in which that feature is active. In some, the tokens between << and >> are those \
on which it is active. In the others, they are tokens at random.

{excerpts}

Answer with nothing but a JSON list of {count} numbers, one for each excerpt in order: 1 if the marked tokens are \
those on which the feature is active, 0 if they are not."""

EXAMPLE_LABEL, EXAMPLE_ANSWER = "names of colours", "[1, 0, 0, 1, 0]"
EXAMPLES = {  # an earlier turn of the chat, without which small models do not answer by a list
    DETECTION_PROMPT: """\
1. The car that he drove was blue.
2. We had no time to go there.
3. It rained all day in the north.
4. a green door and a key
5. She sang to him""",
    FUZZING_PROMPT: """\
1. The car that he drove was<< blue>>.
2. A red<< house>> stood there.
3. I<< like>> green.
4. a<< green>> door and a key
5. The<< sky>> is grey""",
}


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
            f"{server.address} refused {server.model_name}: {said}; check --endpoint, --model-name and OPENAI_API_KEY"
        )


@dataclass(frozen=True)
class Question:
    """Excerpts, each with a yes or no from the judge."""

    chat: Chat
    kinds: tuple[str, ...]  # of each excerpt, as in `JUDGED_SCORES`


def label_prompt(shown: Sequence[Excerpt]) -> str:
    largest = max(abs(code) for excerpt in shown for code in excerpt.codes)
    parts = []
    for number, excerpt in enumerate(shown, 1):
        strengths = [
            f"{json.dumps(token, ensure_ascii=False)} {max(1, round(10 * abs(code) / largest))}"
            for token, code in zip(excerpt.tokens, excerpt.codes, strict=True)
            if code
        ]
        text = marked(excerpt.tokens, excerpt.codes)
        parts.append(f"{number}. {text}\nActive: {', '.join(strengths)}")
    return LABEL_PROMPT.format(excerpts="\n".join(parts))


def marked(tokens: Sequence[str], marks: Sequence[float]) -> str:
    pairs = zip(tokens, marks, strict=True)
    text = "".join(f"<<{token}>>" if mark else token for token, mark in pairs)
    return text.replace("\n", "\\n").strip()


def label_of(answer: str) -> str | None:
    """The label in an answer, else its first line, cut after `LABEL_WORDS` words; None if empty."""
    text = _after_thoughts(answer)
    # Before it may stand "Here is the label:".
    named = re.search(r"(?s)LABEL:(.*)", text) or re.search(r"(?is)label:(?:\W*label:)?(.*)", text)
    lines = re.findall(r"[^\n]*\w[^\n]*", named[1] if named else text)
    first = lines[0] if lines else ""
    words = first.strip(" \t*\"'`").split()
    cut = "..." if len(words) > LABEL_WORDS else ""
    return " ".join(words[:LABEL_WORDS]) + cut or None


def verdicts_of(answer: str, count: int) -> list[int] | None:
    """The list of zeros and ones that ends an answer; None without one of that length."""
    lists = re.findall(r"\[[\s\d,]*\]", _after_thoughts(answer))
    verdicts = re.findall(r"\d+", lists[-1]) if lists else []
    is_sound = len(verdicts) == count and set(verdicts) <= {"0", "1"}
    return [int(verdict) for verdict in verdicts] if is_sound else None


def _after_thoughts(answer: str) -> str:
    return answer.rpartition("</think>")[2].partition("<think>")[0]


def detection(label: str, excerpts: LatentExcerpts, seed: int = 0) -> list[Question]:
    """Questions on all excerpts of held-out rows, shuffled."""
    lines = [
        (marked(excerpt.tokens, [0] * len(excerpt.tokens)), kind)
        for kind in ("firing", "silent", "near")
        for excerpt in getattr(excerpts, kind)
    ]
    order = np.random.default_rng([seed, excerpts.latent, 0]).permutation(len(lines))
    return _questions(DETECTION_PROMPT, label, [lines[index] for index in order])


def fuzzing(label: str, excerpts: LatentExcerpts, seed: int = 0) -> list[Question]:
    """Questions on the firing excerpts, a random half marked wrongly; those with too few silent tokens are left out."""
    draw = np.random.default_rng([seed, excerpts.latent, 1])
    usable = []
    for excerpt in excerpts.firing:
        marks = np.array(excerpt.codes) != 0
        others = np.flatnonzero(~marks & np.array(excerpt.is_row))
        if len(others) >= marks.sum():
            usable.append((excerpt.tokens, marks, others))
    lines = []
    for place, index in enumerate(draw.permutation(len(usable))):
        tokens, marks, others = usable[index]
        kind = JUDGED_SCORES["fuzzing"][place % 2]
        if kind == "wrong":
            wrong = draw.permutation(others)[: marks.sum()]
            marks = np.isin(np.arange(len(marks)), wrong)
        lines.append((marked(tokens, marks.tolist()), kind))
    return _questions(FUZZING_PROMPT, label, [lines[at] for at in draw.permutation(len(lines))])


def _questions(prompt: str, label: str, lines: Sequence[tuple[str, str]]) -> list[Question]:
    example = prompt.format(label=EXAMPLE_LABEL, count=QUESTION_EXCERPTS, excerpts=EXAMPLES[prompt])
    questions = []
    count = -(-len(lines) // QUESTION_EXCERPTS)
    for part in np.array_split(np.array(lines, object), count) if lines else []:
        texts = [f"{number}. {text}" for number, (text, _) in enumerate(part, 1)]
        filled = prompt.format(label=label, count=len(part), excerpts="\n".join(texts))
        chat = (example, EXAMPLE_ANSWER, filled)
        questions.append(Question(chat, tuple(kind for _, kind in part)))
    return questions


def scored(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, Any]:
    """Balanced accuracies, None where no answer counts; numbers of answers, and of those that do not count."""
    verdicts: list[tuple[str, int]] = []
    nonsense = 0
    for question, answer in zip(questions, answers, strict=True):
        found = verdicts_of(answer, len(question.kinds))
        if found is None:
            nonsense += 1
        else:
            verdicts += zip(question.kinds, found, strict=True)
    scores = {}
    for name, (yes, no) in JUDGED_SCORES.items():
        pairs = [(kind == yes, verdict) for kind, verdict in verdicts if kind in (yes, no)]
        true, said = np.array(pairs, bool).reshape(-1, 2).T
        scores[name] = balanced_accuracy(said, true)
    return {"scores": scores, "answers": len(answers), "nonsense": nonsense}


def judge(
    excerpts: Sequence[LatentExcerpts], rules: Mapping[int, str], ask: Ask
) -> list[dict[str, Any]]:
    """Label latents by a language model, which then judges these and the other labels.

    Latents without excerpts to show, or with an empty answer, get no label; `rules` has labels of some.

    Returns a line per latent and kind of label: `latent`, `labels`, of `JUDGED_LABELS`, `label`, and as `scored`.
    """
    shown = [each for each in excerpts if each.shown]
    replies = ask([(label_prompt(each.shown),) for each in shown])
    found = {each.latent: label_of(reply) for each, reply in zip(shown, replies, strict=True)}
    by_model = {latent: label for latent, label in found.items() if label is not None}
    by_kind = dict(zip(JUDGED_LABELS, (by_model, rules, derange(by_model)), strict=True))
    lines: list[dict[str, Any]] = []
    questions: list[list[Question]] = []  # on each line's label
    for each in excerpts:
        for kind, labels in by_kind.items():
            if each.latent in labels:
                label = labels[each.latent]
                lines.append({"latent": each.latent, "labels": kind, "label": label})
                questions.append([*detection(label, each), *fuzzing(label, each)])
    answers = iter(ask([question.chat for part in questions for question in part]))
    return [
        line | scored(part, [next(answers) for _ in part])
        for line, part in zip(lines, questions, strict=True)
    ]
