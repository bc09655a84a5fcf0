"""Mixtures of texts: proportions of rows, marks, kills, and measures by source against those of its rows alone."""

import json
from pathlib import Path
from shlex import split

import numpy as np
import pytest
from homes import CommandLine
from hypothesis import given
from hypothesis import strategies as st
from launching import signalled
from storing import assert_same_pass

import saecli
from saecli.extract.texts import Mixture, TextSource


def write(path: Path, counts: list[int]) -> str:
    """A file of documents with these numbers of words."""
    path.write_text(
        "".join(json.dumps({"text": " ".join(["word"] * count)}) + "\n" for count in counts)
    )
    return str(path)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=2, max_size=4),
    st.lists(st.floats(0.05, 1), min_size=4, max_size=4),
)
def test_rows_keep_their_proportions_and_any_mark_gives_the_rest(tmp_path_factory, counts, weights):
    folder = tmp_path_factory.mktemp("mixture")
    names = [write(folder / f"{index}.jsonl", some) for index, some in enumerate(counts)]
    shares = np.array(weights[: len(counts)]) / sum(weights[: len(counts)])
    sources, told = tuple(map(TextSource, names)), []
    text = Mixture(sources, tuple(names), tuple(shares.tolist()), lambda one: one.text.count("w"))
    whole = list(text.documents(note=told.append))
    assert [document.number for document in whole] == list(range(sum(map(len, counts))))
    assert sorted(line.split(" ends after ")[0] for line in told) == names
    assert [line.endswith("; others go on") for line in told] == [True] * (len(names) - 1) + [False]
    rows, left = np.zeros(len(counts)), np.array([*map(len, counts)])
    for document in whole:
        rows[document.source] += document.text.count("w")
        left[document.source] -= 1
        if left.all():  # none is ahead of another by more than a document
            assert np.ptp(rows / shares) <= max(np.array([*map(max, counts)]) / shares) * (1 + 1e-9)
        mark = json.loads(json.dumps(document.mark))
        for start in (document.number, document.number + 1):
            rest = text.documents(start, mark)
            assert [own[:2] + own[3:] for own in rest] == [
                own[:2] + own[3:] for own in whole[start:]
            ]
    for index, own in enumerate(counts):
        assert [document.text.count("w") for document in whole if document.source == index] == own


def test_ends_of_texts_are_told_where_rows_need_them(sae: CommandLine, tmp_path: Path):
    files = [write(tmp_path / "a.jsonl", [20] * 9), write(tmp_path / "b.jsonl", [20] * 40)]
    mixed = [word for path in files for word in ("--dataset", path)]
    words = ("extract", "--model", "tiny-gemma2", "--json")
    rows = sae(*words, "--dataset", files[0]).json["rows"]

    def told(*more: str) -> list[str]:
        return [line for line in sae(*words, *more).err.splitlines() if " after " in line]

    assert told("--dataset", files[0]) == [f"the text ended after {rows} rows of 100,000"]
    assert told("--dataset", files[0], "--rows", str(rows)) == []
    assert told(*mixed, "--rows", str(rows)) == []  # half of them are of each
    end = f"{files[0]} ends after {rows} rows; others go on"
    assert told(*mixed, "--rows", str(3 * rows)) == [end]
    first, last = told(*mixed)
    assert first == end
    assert last.startswith("the text ended after ") and last.endswith(" rows of 100,000")


@pytest.mark.slow
def test_a_killed_mixture_equals_a_whole_one_and_is_measured_by_source(
    sae: CommandLine, tmp_path: Path
):
    files = [write(tmp_path / name, [*range(3, 40)] * 25) for name in ("a.jsonl", "b.jsonl")]
    mixed = "extract --model tiny-gemma2 --rows 14000 --shard-rows 1000 --name".split()
    for path, weight in zip(["stdlib-docs", *files], "532", strict=True):
        mixed[-1:-1] = ["--dataset", path, "--mix", weight]
    made = sae(*mixed, "whole", "--json").json
    shares = np.array([*made["sources"].values()]) / 14_000
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
    for nth in (3, 12):
        signalled(sae.home, [*mixed, "killed"], ".h5", nth)
    assert sae(*mixed, "killed").status == 0
    assert_same_pass(sae.home / "activations" / "killed", sae.home / "activations" / "whole")
    rows = saecli.open_store("whole", home=sae.home).split("all")
    source = np.concatenate(list(rows.column("source", 512)))
    assert np.bincount(source).tolist() == [*made["sources"].values()]
    assert sae("train --act topk --k 4 --d-sae 64 --steps 50 --name run --data whole").status == 0
    x = np.concatenate([batch.copy() for batch in rows.sequential(512)])
    run = saecli.load_sae("run", home=sae.home)
    found = sae("eval", "run", "--split", "all", "--json").json["runs"][0]["sources"]
    fired = sae("sparsity", "run", "--split", "all", "--json").json["runs"][0]
    for number, (one, other) in enumerate(zip(found, fired["sources"], strict=True)):
        alone = saecli.evaluate(run, x[source == number])
        for name in ("rows", "fvu", "l0"):
            assert one[name] == pytest.approx(alone[name])
        frequency = saecli.sparsity(run, x[source == number])["frequency"]
        assert other["frequency"] == pytest.approx(frequency, abs=1e-3)
        firings = np.multiply(other["firings"], fired["frequency"]) * 14_000
        assert firings == pytest.approx(np.array(other["frequency"]) * other["rows"])
    rates = np.array([one["frequency"] for one in fired["sources"]])
    others = np.array([[14_000 - one["rows"]] for one in fired["sources"]])
    enough = others * np.array(fired["frequency"]) >= 10
    own = ((rates >= 0.9 * rates.sum(0)) & enough).sum(1).tolist()
    assert [one["mainly"] for one in fired["sources"]] == own != [0, 0, 0]


def test_a_source_of_two_documents_is_measured_and_one_of_a_single_document_named(
    sae: CommandLine, tmp_path
):
    counts = {"a": [40] * 20, "b": [60, 60], "c": [80]}
    texts = []
    for name, own in counts.items():
        texts += ["--dataset", write(tmp_path / f"{name}.jsonl", own)]
    assert sae("extract", "--model", "tiny-gemma2", *texts[:4], "--name", "two").status == 0
    with_single = [*texts[:2], *texts[4:], "--name", "single"]
    assert sae("extract", "--model", "tiny-gemma2", *with_single).status == 0
    train = ["train", "--data", "two", "--act", "topk", "--k", "2", "--d-sae", "32", "--steps", "5"]
    assert sae(*train, "--name", "run").status == 0
    both = sae("eval", "run", "--json")
    found = both.json["runs"][0]["sources"]
    assert [Path(one["source"]).name for one in found] == ["a.jsonl", "b.jsonl"]
    assert found[1]["rows"] == 60
    assert "hold none" not in both.err

    for command in ("eval", "sparsity"):
        alone = sae(command, "run", "--data", "single", "--json")
        assert "sources" not in alone.json["runs"][0]
        assert f"test rows hold none of {texts[5]}, where" in alone.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "sites",
    [["mlp_out"], pytest.param(["mlp_in", "mlp_out"], marks=pytest.mark.long)],
    ids=["SAE", "crosscoder"],
)
def test_the_effect_on_the_model_by_source_is_that_on_a_store_of_the_source_alone(
    sae: CommandLine, tmp_path, sites
):
    files = [write(tmp_path / f"{name}.jsonl", [*range(3, 30)] * 4) for name in "ab"]
    Path(files[1]).write_text(Path(files[1]).read_text().replace("word", "return the value"))
    words = split("extract --model tiny-gemma2 --layer 1 --rows 100000")
    words += [*(word for site in sites for word in ("--site", site)), "--name"]
    mixed = [word for file in files for word in ("--dataset", file, "--mix", "1")]
    for name, texts in (("mixed", mixed), ("a", mixed[:2]), ("b", mixed[4:6])):
        assert sae(*words, name, *texts).status == 0
    ends = [f"-l1-{site}" for site in sites] if sites[1:] else [""]
    data = [
        [word for end in ends for word in ("--data", f"{name}{end}")]
        for name in ("mixed", "a", "b")
    ]
    line = "train --act topk --k 4 --d-sae 64 --steps 50 --name run"
    assert sae(line, *data[0]).status == 0
    line = "eval run --split all --model tiny-gemma2 --tokens 1000000 --json"
    run, *alone = (sae(line, *words).json["runs"][0] for words in data)
    for found, expected in zip(run["sources"], alone, strict=True):
        pairs = [[own, *own.get("hook_points", [])] for own in (found, expected)]
        for one, other in zip(*pairs, strict=True):
            for name in ("ce_clean", "ce_spliced", "ce_zero", "ce_recovered", "kl", "tokens"):
                if other[name] is None:  # zeros at a hook point of tiny-gemma2 may cost nothing
                    assert one[name] is None
                else:
                    assert one[name] == pytest.approx(other[name], rel=1e-4)
    assert alone[0]["kl"] != pytest.approx(alone[1]["kl"], rel=0.1)
    done = sae("eval", "run", "--model", "tiny-gemma2", "--csv", tmp_path / "c")
    assert done.out.count("a.jsonl") >= 2 and "kl_on_" in (tmp_path / "c").read_text()
