"""`sae explain --endpoint`: a language model's labels and scores, beside those of rules and the floor."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from chat_server import MODEL, ChatServer, answering
from homes import CommandLine, trained_on_docs
from scipy.stats import t as student

from saecli.base.machine import why_silent
from saecli.extract.options import BUNDLED, TINY_GEMMA2

KINDS, SCORES = ("model", "rule", "model, shuffled"), ("detection", "detection_near", "fuzzing")
COMMAND = f"explain first --latents 4 --model-name {MODEL} --endpoint"


def by_length(turns: list[str]) -> str:
    """A judge by rule: labels are made of the prompt; the longer half of the excerpts, it says, fit."""
    *_, prompt = turns
    if "LABEL:" in prompt:
        return f"LABEL: texts of {len(prompt)} letters"
    sizes = [len(text) for text in re.findall(r"^\d+\. (.*)$", prompt, re.MULTILINE)]
    return str([int(size > np.median(sizes)) for size in sizes])


@pytest.fixture
def judging(sae: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    trained_on_docs(sae)
    monkeypatch.setattr("saecli.measure.endpoint.WAITS", ())
    with answering(by_length) as served:
        yield served


def test_labels_of_a_model_stand_beside_rules_and_the_floor(sae: CommandLine, judging: ChatServer):
    folder = sae.home / "runs" / "first"
    planned = sae(COMMAND, judging.url, "--dry-run", "--json").json
    assert (judging.asked, planned["judged"], planned["plan"]["kept"]) == ([], [], 0)
    document = sae(COMMAND, judging.url, "--json").json
    assert len(judging.asked) == document["plan"]["requests"] == planned["plan"]["requests"]
    latents = [line["latent"] for line in document["latents"]]
    judged = {(line["latent"], line["labels"]): line for line in document["judged"]}
    labels = json.loads((folder / "labels.json").read_text())
    for latent in latents:
        model, rule = judged[latent, "model"], judged[latent, "rule"]
        assert labels[str(latent)]["model"] == {name: model[name] for name in ("label", "scores")}
        assert labels[str(latent)]["rule"]["label"] == rule["label"]
        # This judge does not heed the label: all have the same scores.
        assert judged[latent, "model, shuffled"]["label"] != model["label"]
        assert judged[latent, "model, shuffled"]["scores"] == model["scores"] == rule["scores"]
    for line, kind in zip(document["judged_scores"], KINDS, strict=True):
        found = [judged[latent, kind]["scores"]["detection"] for latent in latents]
        values = [value for value in found if value is not None]
        error = np.std(values, ddof=1) / len(values) ** 0.5
        half = student.ppf(0.975, len(values) - 1) * error
        assert (line["labels"], line["latents"], line["nonsense"]) == (kind, 4, 0)
        assert line["detection"] == pytest.approx(np.mean(values))
        assert line["detection_high"] - line["detection"] == pytest.approx(half)
    judging.asked.clear()
    again = sae(COMMAND, judging.url)
    assert judging.asked == []
    assert f"{document['plan']['requests']} requests, {document['plan']['requests']}" in again.err
    for kind in KINDS:
        assert len(re.findall(rf"│ {kind} +│", again.out.partition("given the label")[2])) == 4 + 1
    for line in document["latents"]:
        told = [(line["model"], "detection", 0.6), (line["rule"], "tokens", 0.55)]
        good = [kind["label"] for kind, name, least in told if (kind["scores"][name] or 0) > least]
        assert line["label"] == (good[0] if good else None)


def test_a_server_that_fails_leaves_the_rules_and_says_what_to_do(
    sae: CommandLine, judging: ChatServer
):
    judging.failing = [(500, "broken", {})]
    failed = sae(COMMAND, judging.url, "--concurrency", "1")
    assert failed.status == 1
    assert re.search("gave no answer in 1 attempt: 500 broken; run the same command", failed.err)
    assert len(json.loads((sae.home / "runs" / "first" / "labels.json").read_text())) == 4
    assert sae("explain first --dry-run").status == 2


def test_a_judge_of_nonsense_has_no_scores_and_is_counted(sae: CommandLine, judging: ChatServer):
    judging.answer = lambda turns: "I like texts."
    document = sae(COMMAND, judging.url, "--json").json
    assert {line["nonsense"] - line["answers"] for line in document["judged_scores"]} == {0}
    assert {line[name] for line in document["judged_scores"] for name in SCORES} == {None}
    shown = sae(COMMAND, judging.url).out
    assert re.search(r"│ rule +│ +\d │( +- │){3} (\d+) of \2 ", shown)


SERVING = ("fastapi", "uvicorn", "openai")  # which pip install 'transformers[serving]' brings


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(find_spec, SERVING)), reason=f"transformers serve needs {', '.join(SERVING)}"
)
def test_transformers_serve_is_an_endpoint(sae: CommandLine, tmp_path: Path):
    trained_on_docs(sae)
    folder = shutil.copytree(BUNDLED[TINY_GEMMA2], tmp_path / "model")
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["transformers.cli.transformers", "serve", folder, "--port", port, "--device", "cpu"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *map(str, words)], stdout=log, stderr=log, cwd=tmp_path
        )
    try:
        url, patience = f"http://localhost:{port}", time.monotonic() + 100
        while why_silent(url, 1) is not None and time.monotonic() < patience:
            assert server.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.5)
        line = f"explain first --latents 2 --endpoint {url} --max-tokens 8 --json --model-name"
        document = sae(line, folder).json
        answers = sum(means["answers"] for means in document["judged_scores"])
        assert 0 < answers < document["plan"]["requests"]
        again = sae(
            line, folder
        ).json  # some labels may be empty: there is less to ask than was planned
        assert again["judged"] == document["judged"]
        assert again["plan"]["kept"] == again["plan"]["requests"] <= document["plan"]["requests"]
        refused = sae(line, "nothing")
        assert "400" in refused.err and "check --endpoint and --model-name" in refused.err
    finally:
        server.terminate()
        server.wait()
