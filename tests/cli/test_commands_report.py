"""`sae report`: what the pages' data say, against numpy; what is refused; what a failure leaves."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import storing
import torch
from homes import CommandLine, D, F, change_json, make_run, make_store, random_sae, some_rows
from model_hub import ModelHub
from reports import (
    NASTY,
    WORDS,
    Texts,
    index_of,
    make_text_run,
    make_text_store,
    pages_of,
    save_model,
)

import saecli
from saecli.measure.latents import LEAST_TOGETHER, bin_edges
from saecli.measure.report import SAMPLED_TEXTS
from saecli.model import TINY_GEMMA2
from saecli.sae.activations import AbsTopK, Relu, ReluTopK
from saecli.sae.dictionary import SAE
from saecli.show.report import write_pages
from saecli.store.reader import ActivationStore
from saecli.store.worlds import directions_of
from saecli.train.runs import read_metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


def for_latents(*latents: int) -> list[str]:
    return [word for latent in latents for word in ("--latent", str(latent))]


def codes_of(texts: Texts, sae: SAE) -> np.ndarray:
    return sae.copy_to(torch.float64).encode(torch.from_numpy(texts.rows).double()).numpy()


def assert_shows(example: dict, texts: Texts, codes: np.ndarray, latent: int, scale: float) -> None:
    """An example has the tokens and codes of its document, the latter to half a step of `scale`."""
    rows = slice(30 * example["document"], 30 * example["document"] + 30)
    assert example["tokens"] == [" " + WORDS[token] for token in texts.columns["token_id"][rows]]
    assert example["codes"] == pytest.approx(codes[rows, latent], abs=0.51 * scale)
    code = codes[example["row"], latent]  # the difference of larger numbers in float32
    assert example["code"] == pytest.approx(code, rel=1e-4, abs=1e-6) and example["code"] != 0


@pytest.mark.parametrize(
    "activation", [Relu(), AbsTopK(k=5)], ids=lambda activation: activation.name
)
def test_pages_show_texts_and_partners(sae: CommandLine, tmp_path: Path, model: str, activation):
    texts, mine = make_text_run(sae.home, model, activation)
    out = tmp_path / "deep" / "out"
    sae("report", "run", "--out", out, "--examples", "3", "--json").succeeds()
    codes = codes_of(texts, mine)
    assert str(Path(model).parent) not in (out / "index.html").read_text(encoding="utf-8")
    pages, index = pages_of(out), index_of(out)["latents"]
    assert sorted(pages) == index["chosen"] == list(range(F))
    for latent, page in pages.items():
        sizes = np.abs(codes[:, latent])
        peaks = [document.max() for document in np.split(sizes, range(30, len(sizes), 30))]
        best = sorted(np.flatnonzero(peaks), key=lambda document: -peaks[document])[:3]
        assert [example["document"] for example in page["examples"]] == best
        for example in page["examples"]:
            first = 30 * example["document"]
            peak = int(sizes[first : first + 30].argmax())
            places = (example["peak"], example["position"], example["row"])
            assert places == (peak, peak + 1, first + peak)
            assert_shows(example, texts, codes, latent, 1e-3 * sizes.max())
        fires = sizes[sizes > 0]
        assert np.sum(page["counts"]) == len(fires)
        measures = {
            "frequency": len(fires) / len(codes),
            "mean": fires.mean() if len(fires) else 0,
            "largest": sizes.max(),
        }
        assert {name: index[name][latent] for name in measures} == pytest.approx(measures, rel=1e-3)
        if len(fires):
            edges = bin_edges()[page["low"] :][: len(page["counts"]) + 1]
            assert edges[0] <= fires.min() * (1 + 1e-6) < edges[1] * (1 + 1e-6)
            assert edges[-2] * (1 - 1e-6) <= fires.max() * (1 - 1e-6) <= edges[-1]
    # Random texts, and what fires together.
    with np.errstate(invalid="ignore"):
        phi = np.nan_to_num(np.corrcoef((codes != 0).T.astype(float)))
    phi[(codes != 0).T.astype(int) @ (codes != 0) < LEAST_TOGETHER] = 0
    np.fill_diagonal(phi, 0)
    chosen = set()
    for latent, page in pages.items():
        documents = [example["document"] for example in page["samples"]]
        firing = set(np.flatnonzero(codes[:, latent]) // 30)
        assert len(documents) == len(set(documents)) == min(SAMPLED_TEXTS, len(firing))
        chosen.add(tuple(sorted(documents)))
        for example in page["samples"]:
            assert_shows(example, texts, codes, latent, page["scale"])
        partners = [other for other, _ in page["together"]]
        values = [value for _, value in page["together"]]
        assert values == pytest.approx(phi[latent, partners], rel=1e-3)
        strongest = max(phi[latent].max(), 0)
        assert max(values, default=0) == pytest.approx(strongest, rel=1e-3, abs=1e-6)
    assert len(chosen) == F  # each latent has its own


def test_interest_is_contrast_times_agreement(sae: CommandLine, tmp_path: Path, model: str):
    texts, mine = make_text_run(sae.home, model, ReluTopK(k=1))
    assert sae("report", "run", "--out", tmp_path / "out", *for_latents(*range(2, 20))).status == 0
    codes, index = codes_of(texts, mine), index_of(tmp_path / "out")["latents"]
    frequency = (codes != 0).mean(0)
    assert {*(frequency[2:] > 0.1)} == {True, False}  # the test sees both
    for latent, told in zip(range(2, F), index["interest"], strict=True):
        sizes = codes[codes[:, latent] != 0, latent]
        examples = pages_of(tmp_path / "out")[latent]["examples"]
        peaks = [example["tokens"][example["peak"]] for example in examples]
        pairs = [a == b for at, a in enumerate(peaks) for b in peaks[:at]]
        expected = (1 - sizes.mean() / sizes.max()) * (1 + np.mean(pairs)) / 2 if len(sizes) else 0
        rare = frequency[latent] > 0.1 or len(sizes) < 10
        assert told == pytest.approx(0 if rare else expected, abs=1e-3)


@pytest.mark.parametrize("split", ["test", "train", "all"])
def test_first_page_measures_as_eval(sae: CommandLine, tmp_path: Path, model: str, split: str):
    make_text_run(sae.home, model)
    words = ("--split", split, "--neuronpedia", "m/3-x", "--json")
    done = sae("report", "--out", tmp_path / "out", *words)
    index = index_of(tmp_path / "out")
    assert index["heading"]["neuronpedia"] == "https://www.neuronpedia.org/m/3-x"
    (held_out,) = sae("eval", "--no-model", "--json").json["runs"]
    (fires,) = sae("sparsity", "--split", split, "--json").json["runs"]
    frequency = fires.pop("frequency")
    assert index["latents"]["frequency"] == pytest.approx(frequency, rel=1e-3)
    assert index["measures"] == held_out == done.json["measures"]
    assert index["firing"] == {name: fires[name] for name in index["firing"]} == done.json["firing"]
    assert {"rows", "silent", "dense"} <= index["firing"].keys()
    assert sum(index["l0"]["counts"]) == fires["rows"]
    assert sum(index["frequency"]["counts"]) == np.count_nonzero(frequency)
    assert index["heading"]["model"] == Path(model).name


def test_headline_is_of_all_rows_where_none_are_held_out(sae: CommandLine, tmp_path: Path):
    texts = make_text_store(sae.home, "texts", None, rows=30)  # one document
    make_run(sae.home, "run", random_sae(), data="texts")
    done = sae("report", "run", "--out", tmp_path / "out", "--json")
    measures = done.json["measures"]
    assert (measures["split"], measures["rows"]) == ("all", len(texts.rows))
    assert "texts holds out no rows" in done.err
    rows, columns = some_rows(7), {"document": np.zeros(7, int), "position": np.arange(7)}
    rows[0] *= 1000
    storing.make_store(sae.home / "activations" / "massive", rows, columns=columns)
    make_run(sae.home, "massive", random_sae(), data="massive")
    done = sae("report", "massive", "--out", tmp_path / "massive").succeeds()
    assert "of 7 rows, 1 row of massive norm holds" in done.err


def test_what_is_written_is_what_the_json_says(sae: CommandLine, tmp_path: Path, model: str):
    make_text_run(sae.home, model)
    done = sae("report", "run", "--out", tmp_path / "out", "--json")
    files = sorted(path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.*"))
    assert [str(path) for path in files] == ["index.html", "latents/00000.js", "latents/00001.js"]
    sizes = [(tmp_path / "out" / path).stat().st_size for path in files]
    assert done.json == {
        "run": "run",
        "data": "texts",
        "split": "all",
        "path": str(tmp_path / "out"),
        "index": str(tmp_path / "out" / "index.html"),
        "latents": F,
        "pages": F,
        "files": 3,
        "bytes": sum(sizes),
        "index_bytes": sizes[0],
        "measures": done.json["measures"],
        "firing": done.json["firing"],
        "notes": [],
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out"]


def test_pages_fetch_nothing_and_texts_end_no_script(sae: CommandLine, tmp_path: Path, model: str):
    make_text_run(sae.home, model)
    sae("report", "run", "--out", tmp_path / "out", "--examples", "20", "--model", model)
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert page.replace("http://www.w3.org/2000/svg", "").count("http") == page.count("http-equiv")
    assert page.lower().count("</script") == page.lower().count("<script") == 2
    pages = pages_of(tmp_path / "out").values()
    examples = [example for latent_page in pages for example in latent_page["examples"]]
    words = {text.strip() for example in examples for text in example["tokens"]}
    assert {word.strip() for word in NASTY} <= words
    for path in (tmp_path / "out" / "latents").iterdir():
        assert not set("<>&\u2028\u2029") & set(path.read_text(encoding="utf-8"))


def test_a_model_adds_the_tokens_that_latents_promote(sae: CommandLine, tmp_path: Path, model: str):
    _, mine = make_text_run(sae.home, model)
    words = ("--out", tmp_path / "out", "--model", model, *for_latents(3, 7, 8))
    done = sae("report", "run", *words, "--json")
    assert done.json["notes"] == [f"3 of {F} latents have pages of their own"]
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(model)
    unit = mine.W_dec / mine.W_dec.norm(dim=1, keepdim=True)
    logits = (unit * llama.model.norm.weight) @ llama.lm_head.weight.detach().T
    logits -= logits.mean(1, keepdim=True)
    pages = pages_of(tmp_path / "out")
    assert list(pages) == [3, 7, 8]
    for latent, page in pages.items():
        upwards = logits[latent].argsort()
        for name, order in (("promoted", upwards.flip(0)), ("suppressed", upwards)):
            tokens, values = zip(*page[name], strict=True)
            assert list(tokens) == [" " + WORDS[token] for token in order[:10].tolist()]
            assert values == pytest.approx(logits[latent][order[:10]].tolist(), rel=1e-3)
        assert page["logits"] == np.histogram(logits[latent].detach().numpy(), 40)[0].tolist()
    index = index_of(tmp_path / "out")["latents"]
    assert index["promoted"][0][0] in " " + pages[3]["promoted"][0][0]


def test_the_model_chooses_a_crosscoders_hook_point(sae: CommandLine, tmp_path: Path, model: str):
    other = str(save_model(tmp_path / "other"))
    for name, its_model in (("texts", model), ("others", other)):
        make_text_store(sae.home, name, its_model)
    cross = random_sae(d_in=2 * D).with_widths((D, D))
    make_run(sae.home, "cross", cross, data="texts", beside=["others"])
    for name, its_model, W_dec in (
        ("first", model, cross.W_dec[:, :D]),
        ("second", other, cross.W_dec[:, D:]),
    ):
        make_run(sae.home, name, random_sae().changed(W_dec=W_dec), data="texts")
        told = []
        for run in ("cross", name):
            out = tmp_path / f"{run}-{name}"
            sae("report", run, "--model", its_model, "--out", out, *for_latents(3)).succeeds()
            told.append([pages_of(out)[3][part] for part in ("promoted", "suppressed")])
        assert told[0] == told[1]
    words = ("--model", TINY_GEMMA2, "--out", tmp_path / "out")
    sae("report", "cross", *words).fails(
        2, f"--model must be a model that the rows of cross came from, {model} or "
    )


def test_report_and_eval_take_the_model_of_a_store(sae: CommandLine, tmp_path: Path, model: str):
    make_text_run(sae.home, model)
    make_run(sae.home, "other", random_sae(seed=1), data="texts")
    (bare,) = sae("eval", "run", "--no-model", "--json").json["runs"]
    (named,) = sae("eval", "run", "--model", model, "--json").json["runs"]
    done = sae("eval", "run", "--json")
    assert done.json["runs"] == [named] and named.items() > bare.items() and named["kl"] > 0
    table = sae("eval", "run", "--tokens", "99").out
    assert f"with the SAE's reconstructions in {model}" in "".join(table.splitlines())
    assert all("kl" not in one for one in sae("eval", "run", "other", "--json").json["runs"])
    assert sae("eval", "r*", "--json").json["runs"] == [named]
    sae("eval", "run", "--no-model", "--model", model).fails(2, "both --model and --no-model")
    sae("eval", "run", "--no-model", "--tokens", "9").fails(2, "--tokens does nothing without")
    with pytest.warns(UserWarning, match="trained on layer 3"):  # as its file says
        in_python = saecli.evaluate(["run", "other"], model=True, home=sae.home)
        assert saecli.evaluate("run", home=sae.home) == bare
    assert in_python[0]["kl"] > 0 and in_python[1]["kl"] > 0
    pages = []
    for name, words in (("own", []), ("named", ["--model", model]), ("none", ["--no-model"])):
        sae("report", "run", "--out", tmp_path / name, *words).succeeds()
        pages.append(pages_of(tmp_path / name))
    assert pages[0] == pages[1] and "promoted" in pages[0][0] and "promoted" not in pages[2][0]
    assert pages[2][0]["examples"] == pages[0][0]["examples"]  # by the tokenizer alone


@pytest.mark.parametrize("command", ["report", "read --prompt a"])
def test_a_command_of_a_run_takes_a_pattern_of_one(sae: CommandLine, tmp_path: Path, command: str):
    make_text_store(sae.home, "texts", None)
    for name in ("t-1", "t-2"):
        make_run(sae.home, name, random_sae(), data="texts")
    name = command.split()[0]
    said = f"sae {name} takes one run, got 't-*', which 2 runs match, t-1 and others; name one"
    out = [] if name == "read" else ["--out", tmp_path / "out"]
    sae(command, "t-*", *out).fails(2, said)
    sae(command, "x-*", *out).fails(1, "no run matches 'x-*'")
    assert "match" not in sae(command, "*-2", *out).err


def test_a_runs_page_has_its_training_curve(sae: CommandLine, tmp_path: Path):
    make_text_store(sae.home, "texts", None)
    make_run(sae.home, "bare", random_sae(), data="texts")
    sae("train --data texts --act topk --k 3 --d-sae 24 --steps 60 --name run").succeeds()
    drawn = {}
    for name in ("run", "bare"):
        sae("report", name, "--out", tmp_path / name).succeeds()
        drawn[name] = index_of(tmp_path / name)["training"]
    logged = read_metrics(sae.home / "runs" / "run")
    for name, key in (("batches", "batch_fvu"), ("held_out", "test_fvu")):
        expected = [[line["step"], line[key]] for line in logged if key in line]
        assert drawn["run"][name] == expected and expected
    assert drawn["bare"] == {"batches": [], "held_out": []}


SPOILT: dict[str, Callable[[Path], object]] = {
    "is no longer there; name the model with --model": lambda folder: folder.rename(f"{folder}-"),
    "does not fit into memory: weights take ": lambda folder: change_json(
        folder / "config.json", intermediate_size=1 << 40
    ),
    "cannot load the model ": lambda folder: (folder / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("reason", SPOILT)
def test_a_lost_model_is_one_note(sae: CommandLine, tmp_path: Path, reason: str):
    folder = save_model(tmp_path / "model")
    make_text_run(sae.home, str(folder))
    (bare,) = sae("eval", "--no-model", "--json").json["runs"]
    SPOILT[reason](folder)
    done = sae("eval", "--json").succeeds()
    assert done.json["runs"] == [bare]
    assert done.err.count("without ") == 1 and "without CE and KL: " in done.err
    assert reason in done.err
    done = sae("report", "--out", tmp_path / "out", "--json").succeeds()
    (note,) = done.json["notes"]
    assert note.startswith("without the language model: ") and reason in note
    assert "promoted" not in pages_of(tmp_path / "out")[0]


def test_a_model_on_the_hub_is_not_downloaded_unasked(sae: CommandLine, hub: ModelHub):
    make_text_run(sae.home, "someone/large")
    done = sae("eval", "--json").succeeds()
    assert "someone/large is not on this machine; --model someone/large gets it" in done.err
    assert not hub.asked
    sae("eval", "--model", "someone/large").fails(1)


def test_rows_that_name_no_model_are_measured_without_a_word(sae: CommandLine, tmp_path: Path):
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "run", random_sae())
    done = sae("eval", "--json").succeeds()
    assert "without" not in done.err and "kl" not in done.json["runs"][0]
    sae("eval", "--tokens", "9").fails(2, "--tokens does nothing without --model")


def test_a_number_chooses_latents_that_fire_most(sae: CommandLine, tmp_path: Path, model: str):
    texts, mine = make_text_run(sae.home, model)
    assert sae("report", "run", "--out", tmp_path / "out", "--latents", "4").status == 0
    often = np.argsort(-(codes_of(texts, mine) != 0).mean(0), kind="stable")[:4]
    pages = pages_of(tmp_path / "out")
    assert sorted(pages) == sorted(often.tolist())
    assert all(page["examples"] for page in pages.values())
    assert len(index_of(tmp_path / "out")["latents"]["frequency"]) == F


def test_a_store_without_tokens_gives_row_numbers_and_says_so(sae: CommandLine, tmp_path: Path):
    rows = make_store(sae.home, "rows", some_rows())
    mine = random_sae()
    make_run(sae.home, "run", mine)
    done = sae("report", "run", "--out", tmp_path / "out", "--examples", "5")
    assert "rows keeps no tokens, so examples are numbers of its rows" in done.err
    codes = mine.encode(torch.from_numpy(rows)).numpy()
    for latent, page in pages_of(tmp_path / "out").items():
        best = np.argsort(-codes[:, latent], kind="stable")[:5]
        assert [example["row"] for example in page["examples"]] == best.tolist()
    assert "tokens" not in index_of(tmp_path / "out")["latents"]


def test_tokens_of_an_unknown_model_are_shown_as_numbers(sae: CommandLine, tmp_path: Path):
    texts, _ = make_text_run(sae.home, None)
    done = sae("report", "run", "--out", tmp_path / "out", "--latent", "0").succeeds()
    assert "texts does not say which model its tokens are of" in done.err
    example = pages_of(tmp_path / "out")[0]["examples"][0]
    start = 30 * example["document"]
    tokens = texts.columns["token_id"][start : start + 30]
    assert example["tokens"] == [f"[{token}]" for token in tokens]


def test_a_report_that_is_stopped_half_way_leaves_nothing(tmp_path: Path):
    def stopped():
        yield {"latents": []}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_pages(tmp_path / "out", "title", {}, stopped())
    assert list(tmp_path.iterdir()) == []


def test_pages_name_the_known_feature_nearest_to_each_latent(sae: CommandLine, tmp_path: Path):
    sae("import", "synthetic", "--features", "40", "--d-in", str(D), "--l0", "4", "--rows", "500")
    store, mine = ActivationStore.open(sae.home / "activations" / "synthetic"), random_sae()
    make_run(sae.home, "run", mine, data="synthetic")
    done = sae("report", "run", "--out", tmp_path / "pages", "--json")
    assert done.json["measures"]["mcc"] == sae("eval", "run", "--json").json["runs"][0]["mcc"]
    unit = torch.nn.functional.normalize(mine.W_dec, dim=1).numpy()
    cosines = unit @ directions_of(store).T
    for latent, page in pages_of(tmp_path / "pages").items():
        feature = int(np.abs(cosines[latent]).argmax())
        assert page["feature"] == [feature, pytest.approx(cosines[latent, feature], rel=1e-3)]
    make_store(sae.home, "plain", next(store.split("all").sequential(500)))
    sae("report", "run", "--data", "plain", "--out", tmp_path / "plain")
    assert not any("feature" in page for page in pages_of(tmp_path / "plain").values())


def test_an_earlier_report_and_nothing_else_is_replaced(sae: CommandLine, tmp_path: Path):
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "run", random_sae())
    out = tmp_path / "pages"
    words = ("report", "run", "--out", out)
    assert sae(*words, "--latents", "3").status == 0
    first = (out / "index.html").read_bytes()
    sae(*words).fails(2, "--overwrite")
    assert (out / "index.html").read_bytes() == first
    assert sae(*words, "--latents", "5", "--overwrite").status == 0
    assert len(index_of(out)["latents"]["chosen"]) == 5
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    strangers = tmp_path / "strangers"
    strangers.mkdir()
    (strangers / "notes.txt").write_text("mine")
    assert sae("report", "run", "--out", strangers, "--overwrite").status == 2
    assert (strangers / "notes.txt").read_text() == "mine"
