"""`saecli.explain` on latents that fire by planted rules, its scores by hand, and labels in files and commands."""

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import CommandLine, make_run, make_store, trained_on_docs
from reports import index_of, save_model
from rich.console import Console
from sklearn.metrics import balanced_accuracy_score
from storing import make_store as make_text_store

import saecli
from saecli.base.console import Silent
from saecli.base.home import Home
from saecli.measure.excerpts import (
    LABEL_EXCERPT,
    Corpus,
    Excerpt,
    LatentExcerpts,
    excerpts_of,
    gather,
)
from saecli.measure.labels import LEAST_SHOWN, Label, balanced_accuracy, read_labels, shown
from saecli.measure.measured import ChosenRows
from saecli.sae.activations import Relu
from saecli.sae.dictionary import SAE
from saecli.show.measures import explanation_tables
from saecli.store.split import is_test

ENDING = "running walking singing eating telling asking going".split()
BEGINNING = "prelude prefix prepare preface preside pretext prevent".split()
CASES = "the The THE a A not Not NOT".split()
FILLER = [f"{first}{last}" for first in "bcdf" for last in "bcdfghjklmnpqrs"]
OTHERS = "return is was are 12 345 6 Paris Berlin Rome , . !".split()
WORDS = ["<unk>", *ENDING, *BEGINNING, *CASES, *OTHERS, *FILLER]
CONTEXT, DOCUMENTS = 40, 600
Fires = Callable[[list[str], int], bool]  # on a document's words at a position from 0


def before(words: list[str], at: int) -> str:
    return words[at - 1] if at else ""


PLANTED: dict[str, Fires] = {
    "`return`": lambda words, at: words[at] == "return",
    "`are`, `is`, `was`": lambda words, at: words[at] in ("is", "was", "are"),
    "words that end in `ing`": lambda words, at: words[at].endswith("ing"),
    "words that begin with `pre`": lambda words, at: words[at].startswith("pre"),
    "`a`, `not`, `the` in any case": lambda words, at: words[at].lower() in ("the", "a", "not"),
    "after `return`": lambda words, at: before(words, at) == "return",
    "before `return`": lambda words, at: at + 1 < len(words) and words[at + 1] == "return",
    "digits": lambda words, at: words[at].isdigit(),
    "position 1 to 3": lambda words, at: at < 3,
    "dense: position 2 to 6": lambda words, at: 1 <= at < 6,
    "`,`": lambda words, at: words[at] == "," and at % 2 == 0,
}
LABELS = list(PLANTED)
SILENT, ALWAYS = len(PLANTED), len(PLANTED) + 1
WIDTH = len(PLANTED) + 2


@dataclass(frozen=True)
class Planted:
    """Documents' words, and the codes of their tokens, which are the store's rows."""

    home: Path
    words: list[list[str]]
    codes: np.ndarray  # (documents, CONTEXT, WIDTH)

    @property
    def held_out(self) -> np.ndarray:
        return is_test(np.arange(DOCUMENTS))

    def finds(self, excerpt: Excerpt, latent: int, held_out: bool) -> bool:
        """Whether an excerpt's tokens and codes stand in a document of that split."""
        tokens = [token.strip() for token in excerpt.tokens]
        for document in np.flatnonzero(self.held_out == held_out):
            words, codes = self.words[document], self.codes[document, :, latent]
            for at in range(CONTEXT - len(tokens) + 1):
                same = words[at : at + len(tokens)] == tokens
                if same and np.allclose(codes[at : at + len(tokens)], excerpt.codes):
                    return True
        return False


def identity() -> SAE:
    """Codes are the rows."""
    eye, zeros = torch.eye(WIDTH), torch.zeros(WIDTH)
    return SAE(eye, zeros, eye.clone(), zeros.clone(), Relu())


def plant(home: Path, model: Path, name: str = "planted") -> Planted:
    rng = np.random.default_rng(0)
    words = [list(rng.choice(WORDS[1:], CONTEXT)) for _ in range(DOCUMENTS)]
    codes = np.zeros((DOCUMENTS, CONTEXT, WIDTH), np.float32)
    for document, own in enumerate(words):
        for at in range(CONTEXT):
            fires = [rule(own, at) for rule in PLANTED.values()]
            codes[document, at, : len(fires)] = fires * (1 + rng.random(len(fires)))
    codes[..., ALWAYS] = 1
    rows = np.arange(DOCUMENTS * CONTEXT)
    numbers = {word: number for number, word in enumerate(WORDS)}
    columns = {
        "document": rows // CONTEXT,
        "position": rows % CONTEXT + 1,
        "token_id": np.array([numbers[word] for own in words for word in own]),
    }
    source = {"layer": 3, "site": "resid_post", "model": str(model)}
    place, rows_of_codes = home / "activations" / name, codes.reshape(-1, WIDTH)
    options = {"columns": columns, "source": source, "shard_rows": 5000, "windows": True}
    make_text_store(place, rows_of_codes, **options)
    return Planted(home, words, codes)


@pytest.fixture
def planted(sae: CommandLine, tmp_path: Path) -> Planted:
    made = plant(sae.home, save_model(tmp_path / "gpt2", WORDS))
    make_run(sae.home, "run", identity(), data="planted")
    return made


def corpus_of(planted: Planted) -> tuple[Corpus, Any]:
    from saecli.measure.explain import texts_of

    run = ChosenRows(Home(planted.home), None, "all", "cpu", Silent()).with_sae("run")
    return gather(run, None, None, Silent()), texts_of(run)


def test_planted_rules_are_found_and_shuffled_ones_score_chance(planted: Planted):
    document = saecli.explain("run", home=planted.home)
    lines = {line["latent"]: line for line in document["latents"]}
    assert sorted(lines) == [*range(SILENT), ALWAYS]
    for latent, label in enumerate(LABELS):
        rule = lines[latent]["rule"]
        parts = rule["label"].partition(" in any")
        found = ", ".join(sorted(parts[0].split(", "))) + "".join(parts[1:])
        assert found == label
        assert lines[latent]["label"] == rule["label"]
        fraction = float((planted.codes[..., latent] > 0).mean())
        assert lines[latent]["frequency"] == pytest.approx(fraction)
        if label != "`,`":
            assert rule["scores"]["tokens"] == 1
    assert [lines[latent]["rule"]["scores"]["texts"] for latent in (0, 1, 5)] == [1, 1, 1]
    assert "rule" not in lines[ALWAYS] and lines[ALWAYS]["label"] is None
    rules, shuffled = document["scores"]
    assert (rules["latents"], rules["labels"]) == (len(PLANTED), "rule")
    for measure in ("texts", "tokens"):
        scores = [lines[latent]["rule"]["scores"][measure] for latent in range(len(PLANTED))]
        known = [score for score in scores if score is not None]
        assert rules[measure] == pytest.approx(np.mean(known))
        assert rules[f"{measure}_low"] < rules[measure] < rules[f"{measure}_high"]
        assert 0.4 < shuffled[measure] < 0.6
    assert rules["tokens"] > 0.95


def test_excerpts_are_of_the_split_and_show_what_the_store_holds(planted: Planted):
    corpus, texts = corpus_of(planted)
    for latent in range(len(PLANTED)):
        found = excerpts_of(corpus, latent, texts)
        assert isinstance(found, LatentExcerpts) and found.latent == latent
        for held_out, group in (
            (False, found.shown),
            *((True, part) for part in (found.firing, found.silent, found.near)),
        ):
            for excerpt in group:
                assert len(excerpt.tokens) == len(excerpt.codes) == LABEL_EXCERPT.length
                assert planted.finds(excerpt, latent, held_out)
        assert 10 < len(found.firing) <= 20 and all(any(each.codes) for each in found.firing)
        assert not any(any(each.codes) for each in (*found.silent, *found.near))
        of_training = planted.codes[~planted.held_out, :, latent]
        peaks = [
            part.max()
            for codes in of_training
            for part in (codes[: LABEL_EXCERPT.length], codes[LABEL_EXCERPT.length :])
        ]
        for excerpt, peak in zip(found.shown[:10], sorted(peaks, reverse=True), strict=False):
            assert peak in excerpt.codes
    near = corpus.spans(5)["near"]
    assert {*corpus.near[5]} <= {*range(WIDTH)} - {5}
    for begin, end in near.tolist():
        assert corpus.codes[begin:end][:, corpus.near[5]].nnz


def test_no_excerpt_is_there_twice_though_a_latent_peaks_twice_in_it(planted: Planted):
    corpus, _ = corpus_of(planted)
    short = replace(corpus, starts=np.arange(0, len(corpus.tokens) + 1, CONTEXT // 2))
    repeated = replace(corpus, near={latent: [1, 2, 1] for latent in corpus.near})
    for each in (corpus, short, repeated):
        for latent in range(len(PLANTED)):
            for spans in each.spans(latent).values():
                assert len(spans) == len(np.unique(spans, axis=0))


def test_the_latents_near_one_are_those_whose_firing_correlates_most(planted: Planted):
    corpus, _ = corpus_of(planted)
    fires = planted.codes[~planted.held_out, :, :SILENT].reshape(-1, SILENT) > 0
    phi = np.corrcoef(fires.T) * (1 - np.eye(SILENT))
    for latent in range(SILENT):
        nearest = np.argsort(-phi[latent])[:5]
        assert corpus.near[latent] == [each for each in nearest if phi[latent, each] > 0]


def test_scores_are_those_counted_by_hand(planted: Planted):
    line = saecli.explain("run", latents=10, home=planted.home)["latents"][0]
    corpus, texts = corpus_of(planted)
    excerpts = excerpts_of(corpus, 10, texts)
    groups = [(excerpts.firing, True), (excerpts.silent, False), (excerpts.near, False)]
    told: dict[bool, list[bool]] = {True: [], False: []}
    tokens: dict[bool, list[bool]] = {True: [], False: []}
    for group, wanted in groups:
        for excerpt in group:
            matches = [token.strip() == "," for token in excerpt.tokens]
            told[wanted].append(any(matches))
            for match, code in zip(matches, excerpt.codes, strict=True):
                tokens[code > 0].append(match)
    for measure, found in (("texts", told), ("tokens", tokens)):
        expected = (np.mean(found[True]) + 1 - np.mean(found[False])) / 2
        assert line["rule"]["scores"][measure] == pytest.approx(expected)
    assert line["rule"]["scores"]["texts"] < 1


def test_balanced_accuracy_is_scikit_learns():
    rng = np.random.default_rng(0)
    for _ in range(20):
        said, true = rng.random((2, 50)) < rng.random((2, 1))
        if true.any() and not true.all():
            expected = balanced_accuracy_score(true, said)
            assert balanced_accuracy(said, true) == pytest.approx(expected)
    assert balanced_accuracy(said, np.ones(50, bool)) is None


@pytest.mark.slow
def test_python_returns_what_the_command_prints(sae: CommandLine, planted: Planted):
    assert sae("explain run --json").json == saecli.explain("run", home=planted.home)


def test_latents_above_chance_are_listed_first_and_the_others_counted(planted: Planted):
    document = saecli.explain("run", home=planted.home)
    document["latents"][3]["label"] = None
    unclear = [line["latent"] for line in document["latents"] if line["label"] is None]
    console = Console(width=140)
    with console.capture() as captured:
        console.print(*explanation_tables(document, 100))
    listed = re.findall(r"^│ (\d+) ", captured.get(), re.MULTILINE)
    assert [int(number) for number in listed[-len(unclear) :]] == unclear
    assert len(listed) == len(document["latents"]) > len(unclear) > 1
    assert f"{len(unclear)} of them without a label above chance, which come last" in " ".join(
        captured.get().split()
    )


def test_a_file_keeps_labels_of_all_kinds_and_shows_given_ones_first(planted: Planted):
    path = planted.home / "runs" / "run" / "labels.json"
    path.write_text(json.dumps({"0": "by hand", str(SILENT): {"model": {"label": "by a model"}}}))
    lines = {line["latent"]: line for line in saecli.explain("run", home=planted.home)["latents"]}
    assert lines[0]["label"] == "by hand" and lines[0]["rule"]["label"] == "`return`"
    labels = read_labels(path, WIDTH)
    assert labels[SILENT] == {"model": Label("by a model")}
    assert labels[1]["rule"] == Label(**lines[1]["rule"])
    damaged = path.with_name("damaged.json")
    damaged.write_text('{"1": 2}')
    with pytest.raises(saecli.SaeError, match=r"cannot read .*damaged\.json: 1"):
        saecli.explain("run", out=damaged, home=planted.home)
    again = saecli.explain("run", latents=[1, 3], count=1, out=path, home=planted.home)
    assert len(again["latents"]) == 1 and read_labels(path, WIDTH) == labels
    rule, model = Label("rule", {"tokens": 0.9}), Label("model")
    assert shown({"rule": rule, "model": model}) == "model"
    assert shown({"rule": rule, "model": model, "given": Label("given")}) == "given"
    assert shown({"rule": rule}) == "rule"
    assert shown({"rule": Label("rule", {"tokens": LEAST_SHOWN})}) is None


OF_NEURONPEDIA = [
    {"modelId": "m", "layer": "3-x", "index": "7", "description": " dates ", "typeName": "t"},
    {"modelId": "m", "layer": "3-x", "index": "2", "description": "names, places"},
    {"modelId": "m", "layer": "3-x", "index": "7", "description": "a second one"},
    {"modelId": "m", "layer": "3-x", "index": "9", "description": None},
]
FILES = {
    "batch-0.jsonl": "".join(json.dumps(entry) + "\n" for entry in OF_NEURONPEDIA),
    "export.json": json.dumps(OF_NEURONPEDIA),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("packed", ["", ".gz", "/"])
def test_labels_of_neuronpedia_are_read(sae: CommandLine, name: str, packed: str):
    make_run(sae.home, "run", identity())
    content, path = FILES[name].encode(), sae.home / name
    if packed == ".gz":
        content, path = gzip.compress(content), sae.home / f"{name}.gz"
    path.write_bytes(content)
    if packed == "/":
        path = (sae.home / "batches").mkdir() or path.rename(sae.home / "batches" / name).parent
    done = sae("explain", "run", "--labels", path, "--json")
    found = {line["latent"]: line["label"] for line in done.json["latents"]}
    assert found == {2: "names, places", 7: "dates"}
    in_file = read_labels(sae.home / "runs" / "run" / "labels.json", WIDTH)
    assert in_file == {2: {"given": Label("names, places")}, 7: {"given": Label("dates")}}
    assert "names, places" in sae("explain", "run", "--labels", path).out


BAD_FILES = {
    "words.json": ("words", "cannot read"),
    "empty.json": ("[]", "expected Neuronpedia's entries with index and description"),
    "dictionary.json": ("{}", "index: Field required"),
    "none.jsonl": ("\n", "it holds no label"),
    "silent.json": ('[{"index": 1, "description": " "}]', "it holds no label"),
    "half.jsonl": ('{"index": "1.5", "description": "a"}', "expected latents 0 to 12"),
    **{
        f"{number}.json": (f'[{{"index": {index}, "description": "a"}}]', "expected")
        for number, index in enumerate(
            ("1.7", "true", '"01"', '"+1"', '" 1"', "null", "[1]", '"1_0"')
        )
    },
    "unnamed.json": ('[{"description": "a"}]', "index: Field required"),
    "above.json": ('[{"index": 13, "description": "a"}]', "expected latents 0 to 12, the last"),
    "below.json": ('[{"index": -1, "description": "a"}]', "expected latents 0 to 12, the last"),
    "large.json": (f'[{{"index": "{"9" * 5000}", "description": "a"}}]', "expected latents 0"),
    "packed.json.gz": ("words", "cannot read"),
    "deep.json": ("[" * 10**5, "cannot read"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_other_files_are_refused_in_a_sentence(sae: CommandLine, name: str):
    folder = make_run(sae.home, "run", identity())
    content, sentence = BAD_FILES[name]
    (sae.home / name).write_text(content)
    sae("explain", "run", "--labels", sae.home / name).fails(1, sentence, name)
    assert not (folder / "labels.json").exists()


@pytest.mark.parametrize("latent", ["13", "-1", "1.7", "1.0", "x", "", "01", "1e1"])
def test_labels_of_latents_that_the_sae_lacks_are_refused(sae: CommandLine, latent: str):
    path = make_run(sae.home, "run", identity()) / "labels.json"
    path.write_text(json.dumps({"12": "kept", latent: "another"}))
    make_store(sae.home, "rows", np.eye(13, dtype=np.float32))
    said = f"expected latents 0 to 12, the last of the SAE, got {latent!r}; correct it"
    sae("sparsity", "run", "--data", "rows").fails(1, said, "labels.json")
    given = sae.home / "export.json"
    given.write_text(FILES["export.json"])
    sae("explain", "run", "--labels", given).fails(1, said)


def test_an_sae_in_memory_needs_a_file_for_labels(planted: Planted, tmp_path: Path):
    mine = identity()
    with pytest.raises(saecli.SaeError, match="--out is needed: sae has no folder"):
        saecli.explain(mine, "planted", home=planted.home)
    out = tmp_path / "labels.json"
    saecli.explain(mine, "planted", latents=0, out=out, home=planted.home)
    assert read_labels(out, WIDTH)[0]["rule"].label == "`return`"


def test_a_crosscoder_has_labels_by_the_texts_of_its_first_store(planted: Planted, tmp_path: Path):
    plant(planted.home, tmp_path / "gpt2", "again")
    stores = saecli.join(
        *(saecli.open_store(name, home=planted.home) for name in ("planted", "again"))
    )
    eye, zeros = torch.eye(WIDTH), torch.zeros(WIDTH)
    both = torch.cat([eye, eye])
    cross = SAE(both / 2, zeros, both.T.clone(), torch.zeros(2 * WIDTH), Relu())
    document = saecli.explain(cross, stores, out=tmp_path / "labels.json", home=planted.home)
    found = {line["latent"]: line["label"] for line in document["latents"]}
    assert found[0] == "`return`" and found[5] == "after `return`"


@pytest.mark.slow
def test_labels_are_shown_by_all_commands_that_list_latents(sae: CommandLine, tmp_path: Path):
    trained_on_docs(sae)
    done = sae("explain", "--top", "3").succeeds()
    document = sae("explain", "--json").json
    mean = document["scores"][0]
    assert f"{mean['tokens']:.3f} ± " in done.out and "rule, shuffled" in done.out
    assert f"{document['latents'][0]['rule']['label']} " in done.out
    labels = {line["latent"]: line["label"] for line in document["latents"] if line["label"]}
    assert len(labels) > 10
    (run,) = sae("sparsity", "--json").json["runs"]
    assert {int(latent): label for latent, label in run["labels"].items()} == labels
    dense = [latent for latent in labels if run["frequency"][latent] > 0.1]
    strongest = max(dense, key=lambda latent: run["frequency"][latent])
    assert (
        f"{strongest} ({run['frequency'][strongest]:.0%}: {labels[strongest]})"
        in sae("sparsity").out
    )
    words = ("--latent", str(strongest), "--prompt", "Return the", "--max-new-tokens", "1")
    assert f" {strongest} {labels[strongest]} " in sae("steer", *words).out
    (latent, *_) = sae("read", "--prompt", "Return the number", "--json").json["latents"]
    assert latent["label"] == labels.get(latent["latent"])
    assert sae("report", "--out", tmp_path / "out").status == 0
    index = index_of(tmp_path / "out")["latents"]
    assert index["label"] == [labels.get(latent) for latent in range(64)]
