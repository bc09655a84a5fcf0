"""Asking a server of chat completions: answers kept, failures waited out or said in a sentence, keys kept secret."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_server import MODEL, ChatServer, answering, asked

import saecli
from saecli.base.console import Silent
from saecli.base.errors import ConfigError, ModelError
from saecli.measure.judge import Endpoint

KEY = "sk-very-secret"
CHATS = [(f"question {number}",) for number in range(12)]


@pytest.fixture(autouse=True)
def no_keys_and_short_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("saecli.measure.judge.WAITS", (0.01, 0.02, 0.03))
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))


@pytest.fixture
def served() -> Iterator[ChatServer]:
    with answering(lambda turns: " ".join(turns).upper()) as server:
        yield server


def endpoint(server: ChatServer, folder: Path, **settings: Any) -> Endpoint:
    return Endpoint(asked(server.url, **settings), folder / "answers.jsonl", Silent())


def test_answers_are_in_order_and_each_request_is_sent_once(served: ChatServer, tmp_path: Path):
    served.wait = threading.Barrier(3, timeout=30).wait
    asker = endpoint(served, tmp_path, concurrency=3)
    assert asker.ask([*CHATS, CHATS[0]]) == [f"QUESTION {number}" for number in [*range(12), 0]]
    assert (len(served.asked), served.most) == (12, 3)
    served.wait = lambda: None
    example = ("say yes", "yes", "say no")
    assert asker.ask([example, *CHATS]) == ["SAY YES YES SAY NO", *asker.ask(CHATS)]
    assert len(served.asked) == 13
    roles = zip(("user", "assistant", "user"), example, strict=True)
    messages = [{"role": role, "content": content} for role, content in roles]
    sent = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 100}
    assert {name: served.asked[-1][name] for name in sent} == sent
    endpoint(served, tmp_path, max_tokens=5).ask(CHATS[:1])
    assert len(served.asked) == 14


def test_passing_failures_are_waited_out(served, tmp_path, monkeypatch):
    served.failing = [(0, ""), (503, "loading"), (429, "slow down")]
    assert endpoint(served, tmp_path).ask(CHATS[:1]) == ["QUESTION 0"]
    assert len(served.asked) == 4
    served.wait = lambda: time.sleep(0.3)
    monkeypatch.setattr("saecli.measure.judge.TIMEOUT", 0.1)
    with pytest.raises(ModelError, match=r"gave no answer in 4 attempts: .*timed out"):
        endpoint(served, tmp_path).ask(CHATS[2:3])


def test_after_all_attempts_the_answers_so_far_are_kept(served: ChatServer, tmp_path: Path):
    endpoint(served, tmp_path).ask(CHATS[:3])
    served.failing = [(503, '{"error": "no \\"GPU\\" is free"}')] * 4
    expected = r"gave no answer in 4 attempts: 503 .* is free.*; run the same .* 3 answers are kept"
    with pytest.raises(ModelError, match=expected):
        endpoint(served, tmp_path, concurrency=1).ask(CHATS)
    assert len(served.asked) == 3 + 4
    assert len(endpoint(served, tmp_path).ask(CHATS)) == 12
    assert len(served.asked) == 3 + 4 + 9


def test_a_refused_key_is_not_sent_again_nor_printed_nor_kept(served, tmp_path, monkeypatch):
    served.failing = [(401, f'{{"error": {{"message": "bad key {KEY}"}}}}')]
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    expected = r"judge-1: 401 .*bad key \.\.\..*; check .* and OPENAI_API_KEY"
    with pytest.raises(ModelError, match=expected) as refused:
        endpoint(served, tmp_path, concurrency=1).ask(CHATS[:1])
    assert served.keys == [f"Bearer {KEY}"]
    endpoint(served, tmp_path).ask(CHATS[:1])
    assert KEY not in str(refused.value)
    assert KEY not in (tmp_path / "answers.jsonl").read_text()


def test_the_hubs_token_is_not_sent_though_the_hub_is_switched_off(served, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert endpoint(served, tmp_path).ask(CHATS[:1]) == ["QUESTION 0"]
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login someone password hf_secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    endpoint(served, tmp_path).ask(CHATS[1:2])
    assert served.keys == [None, None]


def test_an_empty_answer_is_warned_about_and_asked_for_again(served: ChatServer, tmp_path: Path):
    served.answer = lambda turns: None if turns == ["question 1"] else "yes"
    with pytest.warns(UserWarning, match=r"^1 answer of 3 from .* had no text: .*--max-tokens 100"):
        assert endpoint(served, tmp_path).ask(CHATS[:3]) == ["yes", "", "yes"]
    served.answer = lambda turns: "now"
    assert endpoint(served, tmp_path).ask(CHATS[:3]) == ["yes", "now", "yes"]
    assert len(served.asked) == 4


def test_two_servers_of_one_model_do_not_share_answers(served: ChatServer, tmp_path: Path):
    with answering(lambda turns: "another") as other:
        assert endpoint(served, tmp_path).ask(CHATS[:1]) == ["QUESTION 0"]
        assert endpoint(other, tmp_path).ask(CHATS[:1]) == ["another"]


def test_a_password_in_the_url_is_used_but_neither_printed_nor_kept(served, tmp_path):
    with_password = served.url.replace("://", "://me:pass-word@")
    asker = Endpoint(asked(with_password), tmp_path / "answers.jsonl", Silent())
    asker.ask(CHATS[:1])
    assert served.keys == ["Basic bWU6cGFzcy13b3Jk"]
    assert endpoint(served, tmp_path).ask(CHATS[:1]) == ["QUESTION 0"]  # kept, of the same server
    assert len(served.asked) == 1
    served.failing = [(401, f"no access for {with_password}"), *[(503, "busy")] * 4]
    for chat in CHATS[1:3]:
        with pytest.raises(ModelError) as refused:
            asker.ask([chat])
        assert "pass-word" not in str(refused.value)


def test_an_unknown_model_and_a_missing_server_are_said_in_a_sentence(tmp_path: Path):
    with answering(lambda turns: "yes") as served:
        expected = r"404 .*The model `gpt` does not exist\..*; check --endpoint, --model-name"
        with pytest.raises(ModelError, match=expected):
            endpoint(served, tmp_path, model_name="gpt").ask(CHATS[:1])
        assert len(served.asked) == 1
        served.failing = [(400, '{"detail": "too long"}')]
        with pytest.raises(ModelError, match=r"refused judge-1: 400 .*too long"):
            endpoint(served, tmp_path).ask(CHATS[:1])
        for page in ("<html>a proxy's page", '{"choices": []}', '{"error": "no"}', '"hello"', ""):
            served.failing = [(200, page)]
            expected = f"with no chat completion: .*, got {re.escape(page or 'nothing')}; check"
            with pytest.raises(ModelError, match=expected):
                endpoint(served, tmp_path).ask(CHATS[:1])
        endpoint(served, tmp_path).ask(CHATS[:1])
    with pytest.raises(ModelError, match=r"cannot reach http://127.*refused; start the server"):
        endpoint(served, tmp_path).ask(CHATS)
    assert endpoint(served, tmp_path).ask(CHATS[:1]) == ["yes"]  # which needs no server


NO_URLS = ("localhost:8000", "http:///v1", "http://a:80000", "http://a:8o", "http://[::1/v1")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({"endpoint": endpoint}, "--endpoint must be a URL such as") for endpoint in NO_URLS),
        ({"model_name": None}, "--endpoint needs --model-name"),
        ({"endpoint": None}, "--model-name and --dry-run need --endpoint"),
        ({"endpoint": None, "model_name": None, "dry_run": True}, "--dry-run need --endpoint"),
        ({"concurrency": 0}, "--concurrency must be at least 1, got 0"),
        ({"max_tokens": 0}, "--max-tokens must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        saecli.explain("run", **{"endpoint": "http://localhost", "model_name": MODEL, **settings})


ASK = """
import sys
from pathlib import Path
from saecli.base.console import Silent
from saecli.measure.judge import Endpoint, Server
server = Server(sys.argv[1], sys.argv[2], 2, 100, False)
Endpoint(server, Path(sys.argv[3]), Silent()).ask([(f"question {n}",) for n in range(12)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_goes_on_where_it_was(served, tmp_path, stop):
    gate, path = threading.Semaphore(4), tmp_path / "answers.jsonl"
    served.wait = gate.acquire
    words = [sys.executable, "-c", ASK, served.url, MODEL, path]
    with subprocess.Popen(
        words,
        stderr=subprocess.DEVNULL,
        env=os.environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        while len(served.asked) < 6 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(stop)
        while process.poll() is None:  # interrupted, it waits for the answers that it has asked for
            time.sleep(0.05)
            gate.release()
    assert process.returncode == -stop
    kept = len(endpoint(served, tmp_path).answers)
    assert 4 <= kept < 12
    if stop == signal.SIGINT:
        assert kept == len(served.asked)
    served.wait = lambda: None
    with path.open("a") as file:
        file.write('\n{"torn": "answ')
    served.asked.clear()
    answers = endpoint(served, tmp_path).ask(CHATS)
    assert answers == [f"QUESTION {number}" for number in range(12)]
    assert len(served.asked) == 12 - kept
    served.asked.clear()
    assert (endpoint(served, tmp_path).ask(CHATS), served.asked) == (answers, [])


def test_a_plan_counts_requests_and_tokens_and_sends_nothing(served: ChatServer, tmp_path: Path):
    asker = endpoint(served, tmp_path, max_tokens=7)
    asker.ask(CHATS[:2])
    chats = [*CHATS[:4], CHATS[3], ("ab" * 10, "c" * 8, "d" * 4)]
    answers: list[str] = []
    plan = asker.planned(lambda ask: answers.extend(ask(chats)))
    assert answers[:2] == ["QUESTION 0", "QUESTION 1"]
    assert len({*answers}) == 5
    # Three are new, of 10, 10 and 32 characters, at 4 a token.
    assert plan == {"requests": 5, "kept": 2, "tokens_read": 13, "tokens_written": 21}
    assert len(served.asked) == 2
