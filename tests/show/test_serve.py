"""`sae serve`: what it answers is what the public functions return, and only to its own pages."""

import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from homes import CommandLine
from serving import Server, served

import saecli
from saecli.base.console import Silent
from saecli.base.errors import SaeError
from saecli.base.home import Home
from saecli.model import TINY_GEMMA2
from saecli.show.serve.app import MOST_WAITING
from saecli.show.serve.guard import MOST_BYTES
from saecli.show.serve.requests import ToLabel
from saecli.show.serve.workbench import Workbench

TEXT = "def join(parts): return the parts of a path"
EDITS = [{"latent": 100, "method": "add", "scale": 12.0}, {"latent": 7, "method": "ablate"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("home")) as running:
        yield running


def test_a_text_is_read_as_by_the_public_function(server: Server):
    asked = {"run": TINY_GEMMA2, "text": TEXT, "compare": "class Path: pass", "top": 5}
    document = server.post("read", asked).json()
    assert document.pop("notes") == []
    wanted = saecli.read(
        TINY_GEMMA2, TEXT, compare=asked["compare"], latents="listed", top=5, home=server.home
    )
    assert document == json.loads(json.dumps(wanted))


def test_why_a_token_is_asked_by_text_and_by_id(server: Server):
    plain = server.post("read", {"run": TINY_GEMMA2, "text": TEXT}).json()
    token = plain["tokens"][-1]
    before = "".join(one["text"] for one in plain["tokens"][1:-1])
    asked = {"run": TINY_GEMMA2, "text": before, "why": token["token_id"]}
    document = server.post("read", asked).json()
    wanted = saecli.read(TINY_GEMMA2, before, why=token["text"], latents="listed", home=server.home)
    assert document["why"]["value"] == pytest.approx(wanted["why"]["value"])
    assert document["why"]["token"] == token["text"]
    assert len(document["why"]["latents"]) == 10  # the strongest, of all


def test_a_text_that_grows_is_that_of_steer(server: Server):
    events = server.events({"run": TINY_GEMMA2, "text": TEXT, "edits": EDITS[:1], "most": 12})
    assert list(events[0]) == ["next", "notes"] and events[-1]["done"]
    wanted = saecli.steer(TINY_GEMMA2, 100, TEXT, scale=12.0, max_new_tokens=12, home=server.home)
    for name in ("plain", "steered"):
        grown = ["".join(text for text, _ in event[name]) for event in events[1:]]
        assert grown[-1] == wanted["continuations"][0][name]
        assert len({*grown}) >= 10  # a token at a time
    plain, steered = events[0]["next"]["plain"], events[0]["next"]["steered"]
    assert 0 < sum(plain) <= 1 and plain != steered
    first = events[-1]["plain"][0][0]
    assert events[0]["next"]["tokens"][plain.index(max(plain))] == first


def test_without_edits_both_texts_are_the_same_at_any_temperature(server: Server):
    asked = {"run": TINY_GEMMA2, "text": TEXT, "most": 10, "temperature": 1.0, "seed": 3}
    last = server.events(asked)[-1]
    assert last["plain"] == last["steered"]
    assert last["plain"] != server.events(asked | {"seed": 4})[-1]["plain"]


@pytest.mark.parametrize("temperature", [1e-40, 1e-320])
def test_a_temperature_near_zero_takes_the_likeliest_tokens(server: Server, temperature: float):
    asked = {"run": TINY_GEMMA2, "text": TEXT, "edits": EDITS, "most": 5}
    assert server.events(asked | {"temperature": temperature}) == server.events(asked)


def test_codes_are_added_set_and_ablated_in_one_pass(server: Server):
    asked = {"run": TINY_GEMMA2, "text": TEXT, "most": 6}
    both = server.events(asked | {"edits": EDITS})[-1]
    alone = server.events(asked | {"edits": EDITS[:1]})[-1]
    clamped = [{"latent": 100, "method": "clamp", "scale": 12.0}]
    assert both["plain"] == alone["plain"]
    assert server.events(asked | {"edits": clamped})[0]["next"] != server.events(asked)[0]["next"]


def test_a_latents_page_is_that_of_a_report(server: Server, tmp_path: Path):
    saecli.report("own", tmp_path / "pages", "rows", latents=[3], home=server.home)
    script = (tmp_path / "pages" / "latents" / "00000.js").read_text(encoding="utf-8")
    wanted = json.loads(script.removeprefix("saeLatents(0,").removesuffix(");\n"))
    found = server.get("api/latent?run=own&latent=3").json()
    assert found["strings"] == wanted["strings"]
    (page,), (of_report,) = found["latents"], wanted["latents"]
    assert page == of_report
    overview = server.get("api/overview?run=own").json()
    assert len(overview["latents"]["frequency"]) == len(overview["latents"]["tokens"]) == 512
    strongest = [row["tokens"][row["peak"]] for row in page["examples"]]
    assert overview["latents"]["tokens"][3][0] == found["strings"][strongest[0]]


def test_labels_by_hand_are_kept_and_undone(server: Server):
    path = server.home / "runs" / "own" / "labels.json"
    asked = {"run": "own", "latent": 5, "label": "<b>paths</b>"}
    assert server.post("label", asked).json() == {
        "latent": 5,
        "label": "<b>paths</b>",
        "score": None,
        "before": None,
    }
    assert json.loads(path.read_text())["5"]["given"]["label"] == "<b>paths</b>"
    labels = server.get("api/overview?run=own").json()["latents"]["label"]
    assert labels[5] == "<b>paths</b>"
    rule = {"label": "after `(`", "scores": {"texts": 0.7, "tokens": 0.81}}
    path.write_text(json.dumps({"5": {"rule": rule, "given": {"label": "by hand", "scores": {}}}}))
    assert server.get("api/overview?run=own").json()["latents"]["score"][5] is None
    asked_none = server.post("label", asked | {"label": None}).json()
    assert (asked_none["label"], asked_none["score"]) == ("after `(`", 0.81)
    scores = server.get("api/overview?run=own").json()["latents"]["score"]
    assert scores[5] == 0.81 and scores[4] is None
    path.write_text(json.dumps({"5": "<b>paths</b>"}))
    done = server.post("label", asked | {"label": None}).json()
    assert (done["label"], done["before"]) == (None, "<b>paths</b>")
    assert json.loads(path.read_text()) == {}
    refused = server.post("label", asked | {"run": TINY_GEMMA2})
    assert refused.status_code == 422 and "labels are kept with runs" in refused.json()["error"]


def test_runs_and_their_curves_without_paths(server: Server):
    document = server.get("api/runs").json()
    assert [run["name"] for run in document["runs"]] == ["own"]
    assert str(server.home) not in json.dumps(document)
    lines = server.get("api/curves?run=own").json()["lines"]
    assert all(
        set(line) <= {"step", "batch_fvu", "test_fvu", "loss", "batch_l0", "test_l0"}
        for line in lines
    )


MALFORMED: list[tuple[str, Any]] = [
    ("read", asked)
    for asked in [
        *(None, [], "text", 3, {}, {"run": TINY_GEMMA2}, {"run": "none", "text": "a"}),
        *({"run": TINY_GEMMA2, "text": text} for text in ("", " ", 3, None, [], [{"role": 1}], "a" * 20_001)),
        *({"run": run, "text": "a"} for run in ("../own", "/etc/passwd", "own/../own", "\x00", "a" * 600)),
        {"run": TINY_GEMMA2, "text": [{"role": "user", "content": "no template"}]},
        *({"run": TINY_GEMMA2, "text": "a b", "why": why} for why in (10**9, -1, "several words here", "", [])),
        *({"run": TINY_GEMMA2, "text": "a b", "top": top} for top in (0, -1, 51, 1.5, "5")),
        *({"run": TINY_GEMMA2, "text": "a b", "steps": steps} for steps in (0, 51, None)),
        *({"run": TINY_GEMMA2, "text": "a b", "compare": other, "why": 5} for other in ("", "c")),
        {"run": TINY_GEMMA2, "text": "a b", "against": "c"},
        {"run": TINY_GEMMA2, "text": "\ud800"},
    ]
] + [
    ("steer", {"run": TINY_GEMMA2, "text": "a", **more})
    for more in [
        *({"most": most} for most in (0, 513, -1, 10**12)),
        *({"temperature": heat} for heat in (-1, 11, "hot")),
        *({"edits": [{"latent": latent, "method": "add", "scale": 1.0}]} for latent in (-1, 512, 10**9)),
        {"edits": [{"latent": 1, "method": "multiply", "scale": 1.0}]},
        {"edits": [{"latent": 1, "method": "add", "scale": 1e300}]},
        {"edits": [{"latent": 1, "method": "add", "scale": 1.0}] * 2},
        {"edits": [{"latent": n, "method": "add", "scale": 1.0} for n in range(65)]},
        {"text": "word " * 5000},
    ]
] + [
    ("label", {"run": "own", "latent": latent, "label": label})
    for latent, label in [(-1, "a"), (512, "a"), (1, 3), (1, "a" * 501), ("1", "a")]
]  # fmt: skip


@pytest.mark.parametrize(("path", "asked"), MALFORMED)
def test_malformed_requests_are_refused_with_a_sentence(server: Server, path: str, asked: Any):
    response = server.post(path, asked)
    assert response.status_code == 422
    sentence = response.json()["error"]
    assert 10 < len(sentence) < 600 and str(server.home) not in sentence


def test_mutated_requests_never_fail_unforeseen(server: Server):
    rng = np.random.default_rng(0)
    whole = json.dumps({"run": TINY_GEMMA2, "text": TEXT, "top": 3, "most": 2, "edits": EDITS})
    statuses = []
    for number in range(120):
        body = bytearray(whole.encode())
        for _ in range(rng.integers(1, 6)):
            body[rng.integers(len(body))] = rng.integers(256)
        path = f"/api/{('read', 'steer', 'label')[number % 3]}"
        headers = {"Content-Type": "application/json"}
        statuses.append(server.raw("POST", path, bytes(body), headers)[0])
    assert set(statuses) == {200, 422}


PATHS = [
    *("../pyproject.toml", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "assets/../../run.json"),
    *("runs/own/run.json", "app.js/../../labels.json", "/etc/passwd", "\\..\\", "style.css%00.html"),
    *("api/curves?run=../activations/rows", "api/curves?run=%2fetc", "api/curves?run=own%00", "api/curves"),
    *("api/latent?run=own&latent=-1", "api/latent?run=own&latent=1e3", "api/latent?run=own&latent=9999"),
    *("api/latent?run=own&latent=%EF%BC%91", "api/latent?run=own", "api/overview?run=..", "api/overview", "docs"),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_nothing_but_the_assets_is_served(server: Server, path: str):
    status, body = server.raw("GET", f"/{path}")
    assert status in (400, 404, 422)
    assert b"root:" not in body and b"format_version" not in body


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:{port}"}, 403),
        ({"Host": "127.0.0.1"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Length": str(MOST_BYTES + 1)}, 413),
        ({"Host": "localhost:{port}", "Origin": "http://localhost:{port}"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_only_its_own_pages_may_ask(server: Server, headers: dict[str, str], status: int):
    body = json.dumps({"run": TINY_GEMMA2, "text": "a b"})
    given = {name: value.format(port=server.port) for name, value in headers.items()}
    sent = {"Content-Type": "application/json", "Content-Length": str(len(body)), **given}
    assert server.raw("POST", "/api/read", body, sent)[0] == status


def test_pages_run_no_script_but_the_servers_own(server: Server):
    response = server.get("")
    policy = response.headers["content-security-policy"]
    assert "script-src 'self'" in policy and "unsafe" not in policy
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in response.text and "javascript:" not in response.text


def test_another_host_asks_for_the_token(tmp_path: Path, server: Server):
    with served(server.home, token="secret") as guarded:
        assert guarded.get("").status_code == 403
        assert guarded.get("api/about").status_code == 403
        assert guarded.get("?token=wrong").status_code == 403
        assert guarded.get("api/about?token=secret").status_code == 403  # only the page's address
        browser = requests.Session()
        assert browser.get(f"{guarded.url}/?token=secret", timeout=30).status_code == 200
        with served(server.home, token="other") as beside:  # a browser knows hosts, not ports
            assert browser.get(f"{beside.url}/?token=other", timeout=30).status_code == 200
            assert browser.get(f"{beside.url}/api/about", timeout=30).status_code == 200
        assert browser.get(f"{guarded.url}/api/about", timeout=30).json()["model"] == TINY_GEMMA2


def test_the_port_of_http_is_left_out_of_addresses(server: Server):
    with served(server.home, known_as=80) as there:
        for host, status in {"localhost": 200, "localhost:80": 200, "evil.example": 403}.items():
            assert there.raw("GET", "/api/about", None, {"Host": host})[0] == status


def test_labels_are_kept_in_a_home_behind_a_link(server: Server, tmp_path: Path):
    home = tmp_path / "link"
    home.symlink_to(server.home)
    bench = Workbench(Home.at(home), ["own"], None, None, "cpu", Silent())
    assert bench.sae("own").label(ToLabel("own", 6, "paths"))["label"] == "paths"
    assert bench.sae("own").label(ToLabel("own", 6, None))["before"] == "paths"


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    results: list[Any] = [None] * count

    def run(number: int) -> None:
        results[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.slow
def test_a_flood_is_refused_and_what_waits_is_answered(server: Server):
    count = MOST_WAITING + 30
    asked = {"run": TINY_GEMMA2, "text": TEXT * 40}
    statuses = in_threads(count, lambda number: server.post("read", asked).status_code)
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= MOST_WAITING


def test_a_text_that_grows_lets_others_between_its_tokens(server: Server):
    asked = {"run": TINY_GEMMA2, "text": TEXT, "most": 100}
    with requests.post(f"{server.url}/api/steer", json=asked, stream=True, timeout=60) as growing:
        lines = growing.iter_lines()
        next(lines)
        assert server.post("read", {"run": TINY_GEMMA2, "text": TEXT}).status_code == 200
        rest = [line for line in lines if line]
    assert len(rest) > 50  # which came after the other's answer, or with it
    with requests.post(f"{server.url}/api/steer", json=asked, stream=True, timeout=60) as left:
        next(left.iter_lines())
    assert server.post("read", {"run": TINY_GEMMA2, "text": "a b"}).status_code == 200


def test_rows_that_are_not_here_are_said_to_be(tmp_path: Path):
    bench = Workbench(Home.at(tmp_path), [TINY_GEMMA2], None, None, "cpu", Silent())
    with pytest.raises(SaeError, match="shown on rows of a store, which is not here"):
        bench.sae(TINY_GEMMA2).overview()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.long
def test_memory_is_bounded_over_ten_thousand_requests(server: Server):
    def ask(number: int) -> None:
        text = f"{number} {TEXT}"
        match number % 4:
            case 0:
                server.post("read", {"run": TINY_GEMMA2, "text": text})
            case 1:
                server.get(f"api/latent?run=own&latent={number % 512}")
            case 2:
                server.events({"run": "own", "text": text, "edits": EDITS, "most": 2})
            case 3:
                server.get("api/overview?run=own")

    for number in range(2000):  # until all pages that are kept are there
        ask(number)
    before = resident_bytes()
    for number in range(2000, 10_000):
        ask(number)
    assert resident_bytes() - before < 30 * 2**20


@pytest.mark.slow
def test_the_demo_needs_nothing_and_ends_by_ctrl_c(tmp_path: Path):
    command = [sys.executable, "-m", "saecli", "--home", tmp_path, "serve", "--demo"]
    command += ["--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        document = json.loads(process.stdout.readline())
        about = requests.get(f"{document['url']}api/about", timeout=30).json()
        assert [sae["run"] for sae in about["saes"]] == document["runs"] == [TINY_GEMMA2]
        overview = requests.get(f"{document['url']}api/overview?run={TINY_GEMMA2}", timeout=60)
        assert len(overview.json()["latents"]["tokens"]) == 512
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--demo", "first"), "cannot use both --demo and runs"),
        ((TINY_GEMMA2, "--host", "192.0.2.1"), "cannot listen at 192.0.2.1"),
        ((TINY_GEMMA2, "--port", "70000"), "--port must be"),
    ],
)
def test_what_cannot_be_served_is_refused(sae: CommandLine, words: tuple, sentence: str):
    sae("serve", *words).fails(2, sentence)


def test_a_port_in_use_is_refused_before_anything_is_loaded(sae: CommandLine, server: Server):
    sae("serve", TINY_GEMMA2, "--port", str(server.port)).fails(2, f"port {server.port}")
