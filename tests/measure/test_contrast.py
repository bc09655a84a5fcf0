"""`saecli.contrast` and `sae contrast`: worlds with one latent shifted, statistics and tests against brute force,
replication in permuted copies, pairs read through a model."""

import json
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import CommandLine, make_run, make_store, some_rows, trained_on_docs

import saecli
from saecli.base.errors import ConfigError
from saecli.extract.texts import TextSource
from saecli.measure.two_samples import TwoSamples, mean_difference
from saecli.sae.activations import Relu
from saecli.sae.dictionary import SAE
from saecli.store.split import is_test

WIDTH, SHIFTED = 32, 5


def detectors(order: torch.Tensor | None = None) -> SAE:
    """An SAE whose latents are the dimensions of a row, in this order."""
    W = torch.eye(WIDTH)[torch.arange(WIDTH) if order is None else order]
    return SAE(W.T, torch.zeros(WIDTH), W, torch.zeros(WIDTH), Relu())


def rows_of(documents: int, shift: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose dimensions fire on a tenth of them, one of them more often, and their documents."""
    rng = np.random.default_rng(seed)
    numbers = np.repeat(np.arange(documents), rng.integers(10, 40, documents))
    rates = np.full(WIDTH, 0.1)
    rates[SHIFTED] += shift
    fires = rng.random((len(numbers), WIDTH)) < rates
    return (rng.exponential(size=fires.shape) * fires).astype(np.float32), numbers


def two_stores(home: Path, shift: float, documents: int = 120, seed: int = 0, **meta: Any) -> None:
    """Stores a, where a latent is shifted, and b."""
    for name, by in (("a", shift), ("b", 0)):
        x, numbers = rows_of(documents, by, 2 * seed + (name == "b"))
        make_store(home, name, x, columns={"document": numbers}, **meta)


def false_discoveries(document: dict[str, Any]) -> list[int]:
    return [sum(q <= document["fdr"] for q in each["q"]) for each in document["shuffled"]]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_shifted_latent_comes_first_and_shuffled_labels_find_none(tmp_path: Path, sign: int):
    two_stores(tmp_path, 0.15)
    document = saecli.contrast(detectors(), *"ab"[::sign], home=tmp_path)
    first = document["latents"][0]
    assert first["latent"] == SHIFTED and first["q"] <= 0.05
    assert (first["auc"] - 0.5) * sign > 0.1 and first["difference"] * sign > 0
    assert first["auc_low"] < first["auc"] < first["auc_high"]
    assert document["found"] <= 2 and len(document["shuffled"]) == 20
    assert np.mean(false_discoveries(document)) <= 0.25 and document["notes"] == []
    assert not document["paired"]


@pytest.mark.slow
def test_without_a_difference_the_level_is_kept(tmp_path: Path):
    found = []
    for seed in range(20):
        two_stores(tmp_path / str(seed), 0, 60, seed)
        document = saecli.contrast(detectors(), "a", "b", home=tmp_path / str(seed))
        found.append(document["found"] > 0)
    assert sum(found) <= 3  # at 0.05 more have a probability of 0.016


def wins(a: np.ndarray, b: np.ndarray) -> float:
    return ((a[:, None] > b).mean() + (a[:, None] == b).mean() / 2).item()


def test_documents_are_measured_as_by_hand_in_any_order_of_rows(tmp_path: Path):
    x, numbers = rows_of(90, 0.1, 0)
    order = np.random.default_rng(0).permutation(len(x))
    columns = {"document": numbers[order], "source": (numbers % 3).astype(np.int16)[order]}
    sources = ("zero", "one", "two")
    make_store(tmp_path, "mixed", x[order], columns=columns, sources=sources)
    document = saecli.contrast(detectors(), "one", "zero", data="mixed", home=tmp_path)
    each = [x[numbers == number].astype(float) for number in range(90)]
    expected = {
        "frequency": np.array([(rows > 0).mean(0) for rows in each]),
        "mean": np.array([rows.mean(0) for rows in each]),
        "largest": np.array([rows.max(0) for rows in each]),
    }
    held_out = is_test(np.arange(90), test_fraction=0.5)
    of_a, of_b = (np.arange(90) % 3 == number for number in (1, 0))
    sizes = [(held_out & side).sum() for side in (of_a, of_b)]
    assert [side["held_out"] for side in document["sides"]] == sizes
    for line in document["latents"]:
        values = {name: table[:, line["latent"]] for name, table in expected.items()}
        for side, chosen in (("a", held_out & of_a), ("b", held_out & of_b)):
            for name, column in values.items():
                assert line[side][name] == pytest.approx(column[chosen].mean(), rel=1e-6)
        a, b = (values["mean"][held_out & side] for side in (of_a, of_b))
        assert line["auc"] == pytest.approx(wins(a, b))
        assert line["difference"] == pytest.approx(a.mean() - b.mean(), rel=1e-5)
    means = expected["mean"]
    chose = [
        wins(means[~held_out & of_a, latent], means[~held_out & of_b, latent])
        for latent in range(WIDTH)
    ]
    distances = np.abs(np.array(chose) - 0.5)[[line["latent"] for line in document["latents"]]]
    assert (np.diff(distances) <= 1e-9).all()
    lengths = np.array([len(rows) for rows in each])
    length_auc = wins(lengths[held_out & of_a], lengths[held_out & of_b])
    assert document["length"]["auc"] == pytest.approx(length_auc)


def every_split(documents: int, of_a: int) -> list[list[int]]:
    return [list(chosen) for chosen in combinations(range(documents), of_a)]


def every_swap(documents: int, of_a: int) -> list[list[int]]:
    swaps = product((0, 1), repeat=of_a)
    return [[2 * pair + swapped for pair, swapped in enumerate(each)] for each in swaps]


@pytest.mark.parametrize(
    ("paired", "labellings"), [(False, every_split), (True, every_swap)], ids=["free", "paired"]
)
def test_p_is_exact_for_few_documents(paired: bool, labellings: Callable[..., list[list[int]]]):
    values = np.random.default_rng(1).integers(0, 6, (12, 7)).astype(float)
    is_a = np.arange(12) % (2 if paired else 3) == 0
    p = TwoSamples(is_a, paired).p_values(values)
    for column, found in zip(values.T, p, strict=True):
        distances = []
        for chosen in labellings(12, is_a.sum()):
            others = np.setdiff1d(np.arange(12), chosen)
            distances.append(abs(wins(column[chosen], column[others]) - 0.5))
        observed = abs(wins(column[is_a], column[~is_a]) - 0.5)
        assert found == pytest.approx(np.mean(np.array(distances) >= observed - 1e-9))


def test_p_of_many_documents_is_that_of_an_asymptotic_test():
    from scipy.stats import mannwhitneyu, norm, rankdata

    values = np.random.default_rng(2).normal(size=(400, 5))
    is_a = np.arange(400) % 2 == 0
    values[is_a] += np.linspace(0, 0.25, 5)
    free, paired = (TwoSamples(is_a, each).p_values(values) for each in (False, True))
    a, b = values[is_a], values[~is_a]
    np.testing.assert_allclose(free, mannwhitneyu(a, b).pvalue, atol=0.015)
    ranks = rankdata(values, axis=0)
    within = ranks[is_a] - ranks[~is_a]
    z = within.sum(0) / np.sqrt((within**2).sum(0))
    np.testing.assert_allclose(paired, 2 * norm.sf(np.abs(z)), atol=0.015)


@pytest.mark.parametrize("paired", [False, True])
def test_intervals_resample_documents_or_pairs(paired: bool):
    rng = np.random.default_rng(3)
    shared = np.repeat(rng.normal(size=40), 2)  # which pairs cancel
    values = (shared + 0.1 * rng.normal(size=80))[:, None]
    is_a = np.arange(80) % 2 == 0
    low, high = TwoSamples(is_a, paired).interval(mean_difference, values)
    a, b = values[is_a, 0], values[~is_a, 0]
    draws = rng.integers(0, 40, (2, 4000, 40))
    differences = a[draws[0]].mean(1) - b[draws[0 if paired else 1]].mean(1)
    ends = np.quantile(differences, [0.025, 0.975])
    np.testing.assert_allclose([low[0], high[0]], ends, atol=0.1 * np.ptp(ends))


TOPICS = ("sport", "world", "other")


def store_of_topics(home: Path) -> Path:
    """A store `news` of 180 documents of a file with a topic each, sport's shifted, and stores of the first two."""
    path, topics = home / "news.jsonl", np.random.default_rng(0).choice(TOPICS, 180)
    lines = [json.dumps({"text": f"text {at}", "topic": str(of)}) for at, of in enumerate(topics)]
    path.write_text("\n".join([*lines, json.dumps({"text": "not extracted"})]))
    (x, numbers), (shifted, _) = rows_of(180, 0, 1), rows_of(180, 0.15, 1)
    topic = topics[numbers]
    rows = np.where((topic == "sport")[:, None], shifted, x)
    source = TextSource(str(path)).identity()
    make_store(home, "news", rows, columns={"document": numbers}, source=source)
    for name in TOPICS[:2]:
        make_store(home, name, rows[topic == name], columns={"document": numbers[topic == name]})
    return path


def test_values_in_a_column_of_the_dataset_are_sides_as_two_stores_of_them(tmp_path: Path):
    store_of_topics(tmp_path)
    sides = ("sport", "world")
    found = saecli.contrast(detectors(), *sides, data="news", by="topic", home=tmp_path)
    expected = saecli.contrast(detectors(), *sides, home=tmp_path)
    assert found["sides"] == expected["sides"] and not found["paired"]
    assert found["latents"][0]["latent"] == SHIFTED and found["latents"][0]["q"] <= 0.05
    for line, other in zip(found["latents"], expected["latents"], strict=True):
        assert line["latent"] == other["latent"]
        assert line["auc"] == pytest.approx(other["auc"])
        assert (line["a"], line["b"]) == (pytest.approx(other["a"]), pytest.approx(other["b"]))


def test_a_column_that_does_not_fit_is_refused_in_a_sentence(sae: CommandLine):
    sae.home.mkdir()
    path = store_of_topics(sae.home)
    make_run(sae.home, "first", detectors(), data="news")
    words = "contrast first sport world --data"
    for more, said in {
        "news --by kind": "has no --by 'kind': expected one of its columns, text, topic",
        "sport --by topic": "--by needs a store of one dataset's documents",
    }.items():
        sae(f"{words} {more}").fails_in_one_sentence(2, said)
    sae("contrast first sport world --by topic").fails_in_one_sentence(2, "--by needs --data")
    missing = "expected two of its values in news (other, "
    sae("contrast first sport music --data news --by topic").fails_in_one_sentence(2, missing)
    path.write_text(path.read_text().replace("world", "sport"))
    sae(f"{words} news --by topic").fails_in_one_sentence(1, "has changed since news was extracted")


@pytest.mark.parametrize("kind", ["roles", "stores"])
def test_roles_and_stores_of_one_text_are_compared_document_by_document(tmp_path: Path, kind: str):
    """Documents differ far more than the two sides of one."""
    x, numbers = rows_of(60, 0, 0)
    x *= np.random.default_rng(1).uniform(0.3, 2, 60)[numbers, None].astype(np.float32)
    shifted = x * np.where(np.arange(WIDTH) == SHIFTED, 1.3, 1).astype(np.float32)
    if kind == "roles":
        role = np.repeat([2, 3], len(x)).astype(np.uint8)  # user and assistant
        columns = {"document": np.tile(numbers, 2), "role": role}
        make_store(tmp_path, "chats", np.concatenate([shifted, x]), columns=columns)
        sides, data = ("user", "assistant"), "chats"
    else:
        for name, rows in (("base", shifted), ("tuned", x)):
            source = {"dataset": "one", "model": name}
            make_store(tmp_path, name, rows, columns={"document": numbers}, source=source)
        sides, data = ("base", "tuned"), None
    document = saecli.contrast(detectors(), *sides, data=data, home=tmp_path)
    first = document["latents"][0]
    assert document["paired"] and first["latent"] == SHIFTED and first["q"] <= 0.05
    assert first["auc"] < 0.6 and document["found"] <= 2
    assert first["difference_low"] > 0


@pytest.mark.slow
def test_a_permuted_copy_replicates_by_decoder_and_by_codes(tmp_path: Path):
    two_stores(tmp_path, 0.15)
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(0))
    copy = detectors(order)
    document = saecli.contrast(detectors(), "a", "b", home=tmp_path, replicate=copy)
    latents = [line["latent"] for line in document["latents"]]
    for nearest in document["replication"].values():
        assert order[nearest["latents"]].tolist() == latents
        np.testing.assert_allclose(nearest["similarity"], 1, atol=1e-5)
        assert nearest["auc"] == [line["auc"] for line in document["latents"]]
        assert nearest["fraction"] == 1 and nearest["shuffled"] <= 0.5
    for name in "cd":
        x, numbers = rows_of(40, 0, 0)
        make_store(tmp_path, name, x, columns={"document": numbers})
    document = saecli.contrast(detectors(), "c", "d", home=tmp_path, replicate=copy)
    assert document["found"] == 0 and document["replication"]["codes"]["fraction"] is None


def test_few_documents_are_told_and_fewer_refused(tmp_path: Path):
    two_stores(tmp_path, 0.15, documents=20)
    document = saecli.contrast(detectors(), "a", "b", home=tmp_path)
    of_a, of_b = (side["held_out"] for side in document["sides"])
    (note,) = document["notes"]
    half = 1.96 * ((of_a + of_b + 1) / (12 * of_a * of_b)) ** 0.5
    assert f"with {of_a} of a and {of_b} of b held out, 95% of AUCs are 0.5 ± {half:.2f}" in note
    two_stores(tmp_path / "few", 0, documents=3)
    with pytest.raises(ConfigError, match="expected 2 documents of each in both halves"):
        saecli.contrast(detectors(), "a", "b", home=tmp_path / "few")


@pytest.fixture
def world(sae: CommandLine) -> CommandLine:
    two_stores(sae.home, 0.15)
    folder = make_run(sae.home, "first", detectors(), data="a")
    (folder / "labels.json").write_text(json.dumps({SHIFTED: "the shifted one"}))
    make_run(sae.home, "second", detectors(torch.arange(WIDTH).flip(0)), data="a")
    return sae


def test_the_command_prints_and_draws_the_functions_result(
    world: CommandLine, tmp_path: Path, drawn: list[Any]
):
    words = ("contrast", "first", "a", "b", "--replicate", "second")
    expected = saecli.contrast("first", "a", "b", replicate="second", home=world.home)
    assert world(*words, "--json").json == expected
    shown = world(*words, "--plot", tmp_path / "x.png").succeeds()
    assert (tmp_path / "x.png").is_file()
    (axes,) = drawn[0].axes
    names = [text.get_text() for text in axes.texts]
    assert f"{SHIFTED} the shifted one" in names and " document length" in names
    shuffled, above, up_to = (len(line.get_xdata()) for line in axes.lines[:3])
    assert (shuffled, above + up_to, up_to) == (20 * 20, 20, expected["found"])
    rows = [line for line in shown.out.splitlines() if line.startswith("│")]
    heads = [row.split()[1] for row in rows]
    latents = [str(line["latent"]) for line in expected["latents"]]
    assert [head for head in heads if head.isalnum()] == [*latents, "document", "labels"]
    (first,) = (row for row in rows if "the shifted one" in row)
    assert first.split()[1] == str(SHIFTED) and f"{expected['latents'][0]['auc']:.2f} [" in first
    found = f"{expected['found']} of 20 latents tested tell a from b"
    assert found in " ".join(shown.out.split())
    assert "by codes, 100.0% of the latents found replicate in second" in shown.out


def test_length_is_named_where_it_does_as_well(sae: CommandLine):
    for name, kept in (("a", 1), ("b", 0.4)):
        x, numbers = rows_of(120, 0, 0)
        rows = np.random.default_rng(1).random(len(x)) < kept
        make_store(sae.home, name, x[rows], columns={"document": numbers[rows]})
    make_run(sae.home, "first", detectors(), data="a")
    length = sae("contrast first a b --json").json["length"]
    assert length["auc_low"] > 0.8 and length["difference_low"] > 5
    rows = [line for line in sae("contrast first a b").out.splitlines() if line.startswith("│")]
    assert [" yes " in row for row in rows] == [True] * 20 + [False] * 2


def test_pairs_are_read_through_the_model(sae: CommandLine, tmp_path: Path):
    trained_on_docs(sae)
    animals, verbs = "cat dog cow hen fox bat owl ant".split(), "sat ran ate".split()
    pairs = [
        {"a": f"The {animal} {verb} here.", "b": f"The {animal} {verb} there, def f(x): return x"}
        for animal, verb in product(animals, verbs)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    document = sae("contrast first --pairs", path, "--json").json
    assert document["paired"] and [side["documents"] for side in document["sides"]] == [24, 24]
    assert document["length"]["auc"] == 0
    held_out = np.flatnonzero(is_test(np.arange(24), test_fraction=0.5))
    line = document["latents"][0]
    for side in "ab":
        means = []
        for number in held_out:
            text = pairs[number][side]
            read = saecli.read("first", text, latents=[line["latent"]], home=sae.home)
            tokens = sum(not token["special"] for token in read["tokens"])
            means.append(sum(read["latents"][0]["codes"]) / tokens)
        assert line[side]["mean"] == pytest.approx(np.mean(means), rel=1e-5)


REFUSALS = {
    "first a": "expected RUN A B, or RUN --pairs FILE",
    "first a --pairs pairs.jsonl": "A does nothing with --pairs",
    "first a b --data docs": "expected two of its sources or roles (none)",
    "first a b --top-k 0": "--top-k must be at least 1, got '0'",
    "first a b --replicate wide": "--replicate compares runs of one d_in",
    "first a b --model tiny-gemma2": "--model does nothing without --pairs",
    "first user tool --data chats": "expected 2 documents of each in both halves, got (0, 0)",
    "first --pairs pairs.jsonl": "b: Field required; expected lines such as",
    "first --pairs broken.jsonl": "expected one JSON object per line",
    "first --pairs empty.jsonl": "it holds no pair",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_what_cannot_be_contrasted_is_refused(sae: CommandLine, tmp_path: Path, words: str):
    trained_on_docs(sae)
    two_stores(sae.home, 0, documents=2)
    wide = SAE(torch.eye(4), torch.zeros(4), torch.eye(4), torch.zeros(4), Relu())
    make_run(sae.home, "wide", wide, data="docs")
    sae.monkeypatch.chdir(tmp_path)
    for name, text in (("pairs", '{"a": "x"}\n'), ("broken", '{"a"\n'), ("empty", "")):
        Path(f"{name}.jsonl").write_text(text)
    columns = {"role": np.full(30, 3, np.uint8)}
    make_store(sae.home, "chats", some_rows(30, 128), columns=columns)
    status = 1 if words.startswith("first --pairs") else 2
    sae(f"contrast {words}").fails_in_one_sentence(status, REFUSALS[words])
