"""`sae probe`: probes against scikit-learn's own search, activations against plain forward passes, planted labels."""

import os
import random
from pathlib import Path

import numpy as np
import probe_sets
import pytest
import torch
from homes import CommandLine, make_run, random_sae, some_rows, steerable
from launching import captured, python_with
from scipy.sparse import csr_matrix
from scipy.stats import bootstrap
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tiny_models import CONFIGS, WIDTH, loaded, save_model

import saecli
from saecli.measure import probes
from saecli.measure.measured import codes_of
from saecli.measure.probes import (
    CS,
    LastTokens,
    Sets,
    dense_scores,
    mean_and_interval,
    most_different,
    sparse_scores,
)
from saecli.model import TINY_GEMMA2
from saecli.store.origin import HookPoint

ROOT = Path(__file__).parents[2]


def labelled(rows: int = 120, width: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose third feature tells the class, and the fifth a little less, each feature on a scale of its own."""
    draw = np.random.default_rng(0)
    y = np.arange(rows) % 2 == 0
    x = draw.normal(size=(rows, width))
    x[:, 2] += 2 * y
    x[:, 4] += 1.5 * y
    return x * draw.uniform(0.1, 10, width), y


# A probe whose C scikit-learn searches itself.
SEARCH = GridSearchCV(
    make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
    {"logisticregression__C": CS},
    scoring="roc_auc",
    cv=StratifiedKFold(3, shuffle=True, random_state=0),
)


@pytest.mark.slow
def test_probes_are_those_that_scikit_learn_searches_on_latents_of_the_training_part():
    x, y = labelled()
    codes = np.where(np.abs(x) > 0.3, x, 0)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    expected = cross_validate(SEARCH, x, y, scoring=("accuracy", "roc_auc"), cv=folds)
    dense = dense_scores(x, y)
    np.testing.assert_allclose(dense["auc"], expected["test_roc_auc"], atol=1e-12)
    np.testing.assert_allclose(dense["accuracy"], expected["test_accuracy"], atol=1e-12)
    for count in (1, 3, 12):
        aucs = []
        for train, test in folds.split(x, y):
            own, size = codes[train], np.abs(codes[train])
            units = size.sum(0) / (size > 0).sum(0)
            difference = np.abs(own[y[train]].mean(0) - own[~y[train]].mean(0)) / units
            order = np.argsort(-difference)[:count]
            aucs.append(SEARCH.fit(own[:, order], y[train]).score(codes[test][:, order], y[test]))
        scores = sparse_scores(csr_matrix(codes), y, count)
        np.testing.assert_allclose(scores["auc"], aucs, atol=1e-12)
    assert scores["auc"].mean() > 0.8


def test_codes_in_bfloat16_are_read():
    sae, x = random_sae().copy_to(torch.bfloat16), torch.from_numpy(some_rows(9))
    expected = sae.encode(x.bfloat16()).float()
    assert torch.equal(torch.from_numpy(codes_of(sae, x).toarray()), expected)


def test_latents_are_chosen_whatever_the_scale_of_their_codes():
    x, y = labelled()
    codes = np.maximum(x, 0)
    codes[:, 7] = 0
    first = most_different(csr_matrix(codes), y, 12)
    assert most_different(csr_matrix(codes * np.logspace(-4, 4, 12)), y, 12) == first
    assert set(first[:2]) == {2, 4}
    assert first[-1] == 7


def test_interval_of_a_mean_is_students_and_near_the_bootstraps():
    values = np.random.default_rng(1).normal(size=113)
    mean, low, high = mean_and_interval(values)
    ends = bootstrap((values,), np.mean, random_state=np.random.default_rng(2)).confidence_interval
    assert (mean, low, high) == pytest.approx((values.mean(), ends.low, ends.high), abs=0.02)
    assert mean_and_interval(np.array([1.0, 2.0])) == pytest.approx(
        (1.5, 1.5 - 12.706 / 2, 1.5 + 12.706 / 2), rel=1e-4
    )
    assert mean_and_interval(np.array([0.7])) == (0.7, None, None)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_activations_match_each_texts_last_token_alone(tmp_path: Path, architecture: str):
    model = loaded(save_model(tmp_path / "model", architecture, bos=architecture != "gpt2"))
    texts = ["abc", "f", "abcdefghijklmnop", "zz", "qrstuvwxyz"]
    places = [HookPoint(0, "resid_post"), HookPoint(1, "mlp_in")]
    found = LastTokens(model, places, 12, True)(texts)
    for row, text in enumerate(texts):
        token_ids = [1, *(ord(letter) - 93 for letter in text[-11:])]  # begins with BOS, also GPT-2
        with torch.no_grad():
            states = model.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(found[places[0]][row], states[1][0, -1], rtol=1e-4, atol=1e-4)
    assert found[places[1]].shape == (5, WIDTH) and not torch.equal(*found.values())
    if architecture == "gpt2":  # its tokenizer adds none by itself
        without = LastTokens(model, places[:1], 12, False)(texts[:1])[places[0]]
        token_ids = torch.tensor([[ord(letter) - 93 for letter in texts[0]]])
        with torch.no_grad():
            states = model.model(token_ids, output_hidden_states=True).hidden_states
        torch.testing.assert_close(without[0], states[1][0, -1], rtol=1e-4, atol=1e-4)


def test_saes_of_windows_with_and_without_bos_are_probed_apart(sae: CommandLine):
    for name, prepend_bos in (("with", True), ("without", False)):
        origin = {"model": "tiny-gemma2", "layer": 1, "site": "resid_post"}
        make_run(sae.home, name, random_sae(), origin=origin | {"prepend_bos": prepend_bos})
    sae("probe with without --k 1").fails(2, "probe them by separate commands")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data of a package sae-probes with three sets, of which the first is told by the last word."""
    draw, sets = random.Random(0), {}
    words = ["the", "file", "returns", "a", "string,", "and", '"names"', "if", "value", "is\nnone"]
    for name, ends in {
        "5_last_word": ("zip", "net"),
        "12_no word": ("end", "end"),
        "87_long": ("zip", "net"),
    }.items():
        texts = [" ".join(draw.choices(words, k=draw.randrange(4, 20))) for _ in range(100)]
        if name == "87_long":
            texts = ["word " * 50_000 if number < 2 else text for number, text in enumerate(texts)]
        sets[name] = [
            (f"{text} {ends[number % 2]}", ("yes", "no")[number % 2])
            for number, text in enumerate(texts)
        ]
    return probe_sets.install(tmp_path / "site", sets, monkeypatch)


@pytest.fixture
def home(sae: CommandLine, package: Path) -> CommandLine:
    """A home with two SAEs of the bundled model's width."""
    for name, layer in (("first", 1), ("second", 2)):
        origin = {"model": TINY_GEMMA2, "layer": layer, "site": "resid_post"}
        make_run(sae.home, name, steerable(d_in=128), origin=origin)
    return sae


WORDS = ("--rows", "60", "--k", "8", "--k", "2")


@pytest.mark.slow
def test_a_word_is_found_and_the_document_is_that_of_python(home: CommandLine, tmp_path: Path):
    picture = tmp_path / "probes.png"
    words = ("--sets", "5_*,12_no*", "--json", "--plot", picture)
    done = home("probe", "first", "second", *WORDS, *words)
    document = done.json
    options = {"sets": ["5_last_word", "12_no word"], "rows": 60, "k": (2, 8), "home": home.home}
    assert saecli.probe(["first", "second"], **options) == document
    settings = [document[name] for name in ("model", "context", "rows", "folds")]
    assert settings == [TINY_GEMMA2, 128, 60, 5]
    keys = ("run", "layer", "site", "k")
    probed = [("first", 1, 2), ("first", 1, 8), ("second", 2, 2), ("second", 2, 8)]
    probed += [(None, 1, None), (None, 2, None)]  # all dimensions
    expected = [(run, layer, "resid_post", k) for run, layer, k in probed]
    assert [tuple(line[key] for key in keys) for line in document["probes"]] == expected
    assert [line["set"] for line in document["by_set"]] == ["5_last_word"] * 6 + ["12_no word"] * 6
    word, noise = document["by_set"][:6], document["by_set"][6:]
    dense = {line["layer"]: line["auc"] for line in document["probes"] if line["run"] is None}
    for of_word, of_noise, line in zip(word, noise, document["probes"], strict=True):
        assert line["auc"] == pytest.approx((of_word["auc"] + of_noise["auc"]) / 2)
        assert line["auc_low"] < line["auc"] < line["auc_high"]
        assert 0.2 < of_noise["auc"] < 0.8
        if line["run"] is not None:
            difference = line["auc"] - dense[line["layer"]]
            assert line["auc_difference"] == pytest.approx(difference)
        if line["k"] != 2:
            assert of_word["auc"] > 0.97 and of_word["accuracy"] > 0.9
    assert len(word[1]["latents"]) == 8 and word[1]["latents"][:2] == word[0]["latents"]
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--sets", "5*,6_*"), "sets of sae-probes, such as 5_last_word, got '6_*'"),
        (("--context", "129"), "at most 128 tokens, got --context 129"),
        (("--context", "1"), "--context must be above 1"),
    ],
)
def test_sets_and_context_are_refused_in_one_sentence(home, words, sentence):
    home("probe", "first", *words).fails(2, sentence)


def test_missing_sets_and_empty_texts_are_refused(home: CommandLine, package: Path, monkeypatch):
    path = package / "cleaned_data" / "5_last_word.csv.zst"
    empty = [(text, str(bool(text))) for text in ("", "a") * 10]
    probe_sets.write(path, ("prompt", "target"), empty)
    assert "reads no token in the text ''" in home("probe", "first", "--sets", "5_*").err
    # Not by `sys.path`: the package itself may be installed.
    monkeypatch.setattr(probes, "find_spec", lambda name: None)
    home("probe", "first").fails(1, "run `pip install 'saecli[probes]'`")


def with_package(script: str) -> list[str]:
    """The lines that a script prints in an environment with the package itself."""
    done = captured(
        [python_with("sae-probes"), "-c", script],
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_package_has_113_readable_sets_of_two_classes():
    assert (
        with_package(
            "from saecli.measure.probes import Sets\n"
            "sets = Sets()\n"
            "for name in sets.names:\n"
            "    found = sets.read(name, 200)\n"
            "    print(len(found.texts), found.labels.sum(), all(map(str.strip, found.texts)))\n"
        )
        == ["200 100 True"] * 113
    )


@pytest.mark.slow
def test_latents_are_chosen_in_the_packages_own_order():
    # To import its module would import TransformerLens and SAELens, so its functions are taken out of it.
    script = """
import ast, importlib.util, pathlib, typing, numpy, scipy.sparse, torch
from saecli.measure.probes import most_different
folder = importlib.util.find_spec("sae_probes").submodule_search_locations[0]
tree = ast.parse((pathlib.Path(folder) / "run_sae_evals.py").read_text())
wanted = "get_sorted_indices", "mean_act_normalization"
tree.body = [node for node in tree.body if getattr(node, "name", "") in wanted]
exec(compile(tree, "", "exec"), names := {"torch": torch, "Callable": typing.Callable})
draw = numpy.random.default_rng(0)
codes = draw.exponential(size=(200, 50)) * (draw.random((200, 50)) < 0.3) * draw.uniform(0.1, 9, 50)
labels = draw.random(200) < 0.5
order = names["get_sorted_indices"](torch.from_numpy(codes), labels, names["mean_act_normalization"])
print(order.tolist() == most_different(scipy.sparse.csr_matrix(codes), labels, 50))
"""
    assert with_package(script) == ["True"]


def test_the_same_texts_are_read_each_time_as_many_of_each_class(package: Path):
    sets = Sets()
    assert sets.names == ["5_last_word", "12_no word", "87_long"] == sets.chosen(None)
    first, repeated = sets.read("5_last_word", 60), sets.read("5_last_word", 60)
    assert first.texts == repeated.texts and len(first.texts) == 60 and first.labels.sum() == 30
    assert [text.split()[-1] == "zip" for text in first.texts] == first.labels.tolist()
    assert len(sets.read("5_last_word", 1000).texts) == 100
    assert len(sets.read("87_long", 100).texts[0]) > 200_000
