"""Labels by a language model, their detection and fuzzing scores, and the floor, by judges whose scores are known; and
`sae explain --endpoint`, which sets them beside those of rules."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_server import MODEL, ChatServer, answering, asked
from homes import CommandLine, trained_on_docs
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from saecli.base.console import Silent
from saecli.base.machine import why_silent
from saecli.measure.excerpts import Excerpt, LatentExcerpts
from saecli.measure.judge import (
    JUDGED_LABELS,
    Endpoint,
    Question,
    detection,
    fuzzing,
    judge,
    label_of,
    label_prompt,
    scored,
    verdicts_of,
)
from saecli.measure.labels import derange
from saecli.model import BUNDLED, TINY_GEMMA2

ANIMALS = ("cat", "dog", "fish", "bird")
FILLING = "the a sat on mat in house red blue ran to and tree".split()


def excerpt(rng: np.random.Generator, word: str | None, code: float = 0.0) -> Excerpt:
    """Twelve tokens, one of them the word, on which alone a latent has a code."""
    tokens = [f" {filling}" for filling in rng.choice(FILLING, 12)]
    codes = [0.0] * 12
    if word is not None:
        place = int(rng.integers(12))
        tokens[place], codes[place] = f" {word}", code
    return Excerpt(tuple(tokens), tuple(codes), (True,) * 12)


def of_animals(firing: int = 10) -> list[LatentExcerpts]:
    """A latent for each animal, to which the next animal's is near."""
    rng = np.random.default_rng(0)
    return [
        LatentExcerpts(
            latent,
            tuple(excerpt(rng, animal, code) for code in rng.uniform(1, 9, 6)),
            tuple(excerpt(rng, animal, code) for code in rng.uniform(1, 9, firing)),
            tuple(excerpt(rng, None) for _ in range(10)),
            tuple(excerpt(rng, ANIMALS[(number + 1) % 4]) for _ in range(5)),
        )
        for number, (latent, animal) in enumerate(zip((30, 4, 7, 11), ANIMALS, strict=True))
    ]


def reading(turns: Sequence[str]) -> str:
    """A judge by rule: labels are the most frequent marked word, and verdicts whether an excerpt has the label in it,
    or marked."""
    *_, prompt = turns
    texts = re.findall(r"^\d+\. (.*)$", prompt, re.MULTILINE)
    if "LABEL:" in prompt:
        marked = re.findall("<< (.*?)>>", prompt.split("\n\n", 1)[1])
        return f"Let me see.\nLABEL: {max(marked, key=marked.count)}"
    label = prompt.split("active on: ")[1].split("\n")[0]
    wanted = f"<< {label}>>" if "random" in prompt else label
    return f"Here it is: {[int(wanted in text) for text in texts]}"


def judged_by(
    answer: Callable[[Sequence[str]], str], rules: dict[int, str]
) -> dict[str, dict[int, Any]]:
    """What a judge makes of the animals, by kind of label and latent."""
    judged: dict[str, dict[int, Any]] = {kind: {} for kind in JUDGED_LABELS}
    for line in judge(of_animals(), rules, lambda chats: [answer(chat) for chat in chats]):
        judged[line["labels"]][line["latent"]] = line
    return judged


def test_a_judge_that_reads_scores_one_and_the_floor_a_half():
    excerpts = of_animals()
    judged = judged_by(reading, {30: "cat", 4: "the"})
    assert {latent: one["label"] for latent, one in judged["model"].items()} == dict(
        zip((30, 4, 7, 11), ANIMALS, strict=True)
    )
    perfect = {"detection": 1.0, "detection_near": 1.0, "fuzzing": 1.0}
    assert [one["scores"] for one in judged["model"].values()] == [perfect] * 4
    assert judged["rule"].keys() == {30, 4}
    assert judged["rule"][30]["scores"] == perfect
    has_the = [
        [" the" in one.tokens for one in part] for part in (excerpts[1].firing, excerpts[1].silent)
    ]
    expected = (np.mean(has_the[0]) + 1 - np.mean(has_the[1])) / 2
    assert judged["rule"][4]["scores"]["detection"] == pytest.approx(expected)
    # Another animal is in none of the firing excerpts, nor marked; near ones have it, or not, all alike.
    for latent, one in judged["model, shuffled"].items():
        assert one["label"] != judged["model"][latent]["label"]
        assert one["scores"]["detection_near"] in (0.0, 0.5)
        assert (one["scores"]["detection"], one["scores"]["fuzzing"]) == (0.5, 0.5)
    assert (judged["model"][4]["answers"], judged["model"][4]["nonsense"]) == (5 + 2, 0)


def question(kinds: str) -> Question:
    names = {"f": "firing", "s": "silent", "n": "near", "r": "right", "w": "wrong"}
    return Question(("?",), tuple(names[letter] for letter in kinds))


def test_scores_are_those_computed_by_hand_and_nonsense_is_left_out():
    questions = [question(kinds) for kinds in ("fsnff", "sssf", "fffff", "rw", "rw", "rrw")]
    answers = ["[1, 1, 0, 0, 1]", "[0, 0, 1, 1]", "[1, 1, 1]", "[0, 1]", "0, 1", "so: [1,0,1]\n"]
    judged = scored(questions, answers)
    # Yes on 3 of 4 firing, 2 of 4 silent, none of 1 near; on 1 of 3 right and 2 of 2 wrong.
    expected = {"detection": (0.75 + 0.5) / 2, "detection_near": (0.75 + 1) / 2, "fuzzing": 1 / 6}
    assert judged["scores"] == pytest.approx(expected)
    assert (judged["answers"], judged["nonsense"]) == (6, 2)


def test_a_latent_without_an_answer_that_counts_has_no_score():
    judged = judged_by(lambda turns: "I cannot say [0, 1, 2, 1, 0]", {7: "fish"})
    assert judged["model"][7]["label"] == "I cannot say [0, 1, 2, 1, 0]"
    for one in (judged["model"][30], judged["rule"][7], judged["model, shuffled"][11]):
        assert set(one["scores"].values()) == {None}
        assert one["nonsense"] == one["answers"] == 7
    silent = judged_by(lambda turns: "", {7: "fish"})
    assert (silent["model"], silent["model, shuffled"], silent["rule"].keys()) == ({}, {}, {7})
    always = judged_by(lambda turns: "yes [1, 1, 1, 1, 1]", {})
    assert {score for one in always["model"].values() for score in one["scores"].values()} == {0.5}


@given(seed=st.integers(0, 1000), firing=st.integers(0, 13))
def test_each_excerpt_is_asked_about_once_with_its_kind(seed: int, firing: int):
    excerpts = of_animals(firing)[0]
    for questions, part in (
        (detection("cat", excerpts, seed), ("firing", "silent", "near")),
        (fuzzing("cat", excerpts, seed), ("firing",)),
    ):
        asked = []
        for each in questions:
            texts = re.findall(r"^\d+\. (.*)$", each.chat[-1], re.MULTILINE)
            asked += zip(texts, each.kinds, strict=True)
            assert 1 <= len(texts) <= 5
        texts = [re.sub("<<|>>", "", text).strip() for text, _ in asked]
        wanted = ["".join(one.tokens).strip() for name in part for one in getattr(excerpts, name)]
        assert sorted(texts) == sorted(wanted)
        for text, kind in asked:
            marked = re.findall("<<(.*?)>>", text)
            assert len(marked) == (kind in ("right", "wrong"))
            assert kind not in ("right", "wrong") or (marked == [" cat"]) == (kind == "right")
            assert kind not in ("firing", "silent", "near") or ("cat" in text) == (kind == "firing")
    counts = [kind for each in fuzzing("cat", excerpts, seed) for kind in each.kinds]
    assert counts.count("right") - counts.count("wrong") == firing % 2


def test_an_excerpt_that_is_active_throughout_cannot_be_marked_wrongly():
    for dense in (
        Excerpt((" a", " b", " c"), (1.0, 2.0, 0.0), (True,) * 3),
        Excerpt(("<s>", " b"), (0.0, 2.0), (False, True)),  # a token without a row cannot be active
    ):
        assert fuzzing("x", LatentExcerpts(0, (dense,), (dense,), (), ())) == []


def test_the_prompt_for_a_label_has_marks_and_strengths():
    excerpts = [
        Excerpt((" a", " b\n", ' "'), (0.0, 4.0, 8.0), (True,) * 3),
        Excerpt(("é",), (0.1,), (True,)),
    ]
    prompt = label_prompt(excerpts)
    assert '1. a<< b\\n>><< ">>\nActive: " b\\n" 5, " \\"" 10\n2. <<é>>\nActive: "é" 1\n' in prompt


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("LABEL: names of animals", "names of animals"),
        ("<think>LABEL: no</think>\n**Label: names of animals**\nThey are.", "names of animals"),
        ('\n"names of animals"\nor others', "names of animals"),
        (" ".join("abcdefghijklmnopq"), "a b c d e f g h i j k l m n o..."),
        ("LABEL:", None),
        ("...\n", None),
        ("Here is the label:\n\nLABEL: names of animals", "names of animals"),
        ("The label:\n**Label:** names of animals", "names of animals"),
        ("LABEL:\nnames of animals", "names of animals"),
        ('LABEL: the word after "label:" in forms', 'the word after "label:" in forms'),
    ],
)
def test_labels_are_read_from_answers(answer: str, label: str | None):
    assert label_of(answer) == label


@pytest.mark.parametrize(
    ("answer", "verdicts"),
    [
        ("[1, 0,1]", [1, 0, 1]),
        ("```json\n[\n1,\n0,\n1]\n```", [1, 0, 1]),
        ("<think>[0, 0, 0]</think>[1, 0, 1]", [1, 0, 1]),
        ("[0, 0, 0] no, [1, 0, 1]", [1, 0, 1]),
        ("[1, 0]", None),
        ("[1, 0, 1, 0]", None),
        ("[1, 0, 3]", None),
        ("1, 0, 1", None),
        ("<think>[1, 0, 1]", None),
        ("", None),
    ],
)
def test_verdicts_are_read_from_answers_or_count_as_none(answer: str, verdicts: list[int] | None):
    assert verdicts_of(answer, 3) == verdicts


@given(st.dictionaries(st.integers(0, 99), st.uuids().map(str)), st.integers(0, 9))
def test_no_label_stays_where_it_was(labels: dict[int, str], seed: int):
    moved = derange(labels, seed)
    assert sorted(moved.values()) == (sorted(labels.values()) if len(labels) > 1 else [])
    assert all(moved[latent] != label for latent, label in labels.items() if latent in moved)


def test_what_is_planned_is_what_is_asked_and_a_second_time_costs_nothing(tmp_path: Path):
    with answering(reading) as served:
        server = asked(served.url)
        asker = Endpoint(server, tmp_path / "answers.jsonl", Silent())
        plan = asker.planned(partial(judge, of_animals(), {30: "the"}))
        judged = judge(of_animals(), {30: "the"}, asker.ask)
        assert len(served.asked) == plan["requests"] == 4 + 9 * 7
        characters = sum(len(turn["content"]) for sent in served.asked for turn in sent["messages"])
        assert 0.8 < plan["tokens_read"] / (characters / 4) < 1.3
    again = Endpoint(server, tmp_path / "answers.jsonl", Silent())
    assert judge(of_animals(), {30: "the"}, again.ask) == judged


SCORES = ("detection", "detection_near", "fuzzing")
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
    monkeypatch.setattr("saecli.measure.judge.WAITS", ())
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
    for line, kind in zip(document["judged_scores"], JUDGED_LABELS, strict=True):
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
    for kind in JUDGED_LABELS:
        assert len(re.findall(rf"│ {kind} +│", again.out.partition("given the label")[2])) == 4 + 1
    for line in document["latents"]:
        told = [(line["model"], "detection", 0.6), (line["rule"], "tokens", 0.55)]
        good = [kind["label"] for kind, name, least in told if (kind["scores"][name] or 0) > least]
        assert line["label"] == (good[0] if good else None)


def test_a_server_that_fails_leaves_the_rules_and_says_what_to_do(sae, judging):
    judging.failing = [(500, "broken")]
    said = "gave no answer in 1 attempt: 500 broken; run the same command"
    sae(COMMAND, judging.url, "--concurrency", "1").fails(1, said)
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
