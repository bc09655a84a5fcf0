"""`sae extract` with several layers and sites, packed windows, batches of any size, and memory that runs out."""

import json
import shutil
from pathlib import Path
from shlex import split

import numpy as np
import pytest
import torch
from homes import CommandLine, make_run
from storing import assert_same_pass
from tiny_models import WIDTH, save_model, stored
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import saecli
from saecli.sae.activations import TopK
from saecli.sae.dictionary import SAE
from saecli.store.reader import ActivationStore

TEXT = "\n\n".join(
    "".join("abcdefghijklmnop"[(i * n) % 16] for i in range(n % 37)) or "a" for n in range(120)
)
SEVERAL = ("--layer", "0", "--layer", "2", "--site", "resid_post", "--site", "mlp_out")
LETTER_C = 6  # its token


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "gemma2", "gemma2")


def store(home: Path, name: str) -> ActivationStore:
    return ActivationStore.open(home / "activations" / name)


def read(home: Path, name: str) -> tuple[np.ndarray, dict[str, list[int]]]:
    rows, columns = stored(home / "activations" / name)
    return rows, {name: column.tolist() for name, column in columns.items()}


@pytest.mark.slow
def test_several_hook_points_hold_the_rows_of_each_alone(sae: CommandLine, model, text):
    words = (
        f"extract --model {model} --dataset {text} --context 16 --rows 900 --batch-size 4 --json"
    ).split()
    together = sae(*words, *SEVERAL).json["stores"]
    assert together[0].keys() >= {"name", "path", "rows", "d_in", "dtype", "shards", "cached"}
    assert [found["cached"] for found in together] == [False] * 4
    assert (
        len({found["name"].rpartition("-")[2] for found in together}) == 1
    )  # one hash, of the request
    labels = [f"l{layer}-{site}" for layer in "02" for site in ("mlp_out", "resid_post")]
    for index, (layer, site) in enumerate(
        (layer, site) for layer in "02" for site in ("resid_post", "mlp_out")
    ):
        alone = sae(*words, "--layer", layer, "--site", site).json
        assert not alone["cached"] and alone["name"] != together[index]["name"]
        metas = [store(sae.home, found["name"]).meta for found in (alone, together[index])]
        assert_same_pass(
            Path(together[index]["path"]), Path(alone["path"]), but_for=("source", "request_hash")
        )
        beside = [label for label in labels if label != f"l{layer}-{site}"]
        assert metas[1].source == {**metas[0].source, "beside": beside}
    again = sae(
        *words, "--site", "mlp_out", "--site", "resid_post", "--layer", "2", "--layer", "0"
    ).json["stores"]
    assert all(found["cached"] for found in again)
    every = sae(*words, "--layer", "all", "--site", "resid_post", "--name", "all").json["stores"]
    assert [found["name"] for found in every] == [f"all-l{layer}-resid_post" for layer in range(3)]
    assert {found["name"] for found in again} == {found["name"] for found in together}
    assert "same tokens as" in sae(*words[:-1], *SEVERAL).out
    assert sae(*words, "--layer", "0", "--layer", "0").json["cached"]  # one store, said as one


@pytest.fixture
def overflowing(tmp_path: Path) -> Path:
    """A model that embeds the letter c beyond float16's range; its MLPs' inputs are normalised."""
    folder = save_model(tmp_path / "overflowing", "llama")
    found = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        found.get_input_embeddings().weight[LETTER_C] *= 1e6
    found.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_rows_that_one_store_drops_are_dropped_from_all(sae: CommandLine, overflowing, text):
    words = (
        f"extract --model {overflowing} --dataset {text} --layer 1 --context 16 --rows 500 "
        "--shard-rows 60 --dtype float16 --name s --json"
    ).split()
    both = (*words, "--site", "resid_pre", "--site", "mlp_in")
    pre, mlp = sae(*both).json["stores"]
    assert pre["dropped"] == mlp["dropped"] and pre["dropped"]["nonfinite"] > 20
    assert read(sae.home, pre["name"])[1] == read(sae.home, mlp["name"])[1]
    columns = read(sae.home, mlp["name"])[1]
    assert LETTER_C not in columns["token_id"] and len(columns["token_id"]) == 500
    first = shutil.move(pre["path"], sae.home / "first")
    meta = store(sae.home, mlp["name"]).meta
    assert [found["cached"] for found in sae(*both).json["stores"]] == [False, True]
    assert_same_pass(Path(pre["path"]), first)
    assert store(sae.home, mlp["name"]).meta == meta


def test_a_row_that_one_model_cannot_store_is_dropped_from_both(
    sae: CommandLine, model, overflowing, text
):
    def by_token(name: str) -> dict[tuple[int, ...], np.ndarray]:
        rows, columns = read(sae.home, name)
        return dict(zip(zip(*columns.values(), strict=True), rows, strict=True))

    words = (
        f"extract --dataset {text} --layer 1 --context 16 --rows 300 --dtype float16 --json"
    ).split()
    both = ("--model", model, "--model", overflowing, "--name", "s")
    first, second = sae(*words, *both).json["stores"]
    assert (first["name"], second["name"]) == (
        "s-gemma2-l1-resid_post",
        "s-overflowing-l1-resid_post",
    )
    assert first["dropped"]["nonfinite"] == second["dropped"]["nonfinite"] > 10
    columns = read(sae.home, second["name"])[1]
    assert read(sae.home, first["name"])[1] == columns and LETTER_C not in columns["token_id"]
    for found, own in ((first, model), (second, overflowing)):
        alone, together = (
            by_token(sae(*words, "--model", own).json["name"]),
            by_token(found["name"]),
        )
        keys = [*alone.keys() & together.keys()]
        assert len(keys) > 200
        np.testing.assert_allclose(
            [together[key] for key in keys], [alone[key] for key in keys], rtol=2e-3, atol=1e-3
        )
    assert all(one["cached"] for one in sae(*words, *both).json["stores"])
    stores = saecli.extract(
        [str(overflowing), str(model)], layer=1, dataset=str(text), rows=50, home=sae.home
    )
    assert [store.meta.source["model"] for store in stores] == [str(overflowing), str(model)]


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ("model", "--model names {} twice; name each model once"),
        (
            "plain",
            "do not read the same tokens: expected one tokenizer, got windows that begin with the special tokens "
            "[1] and []",
        ),
        ("tiny-gemma2", "expected one tokenizer, got 64 and 2,048 tokens"),
    ],
)
def test_models_that_do_not_read_the_same_tokens_are_refused(
    sae: CommandLine, model, text, tmp_path, second, sentence
):
    other = {"model": model, "plain": save_model(tmp_path / "plain", "llama", bos=False)}.get(
        second, second
    )
    words = ("--model", model, "--model", other, "--dataset", text, "--prepend-bos", "off")
    done = sae("extract", *words)
    assert done.status == 2 and sentence.format(other) in done.err


def test_models_of_which_one_has_an_added_token_read_the_tokens_that_they_share(
    sae: CommandLine, model, text, tmp_path: Path
):
    config = AutoConfig.from_pretrained(model)
    config.vocab_size += 1
    thinking = save_model(tmp_path / "thinking", config)
    tokenizer = AutoTokenizer.from_pretrained(thinking)
    tokenizer.add_tokens("<think>")
    tokenizer.save_pretrained(thinking)
    more = ("--layer", "1", "--rows", "200", "--context", "16")
    both = ("--model", model, "--model", thinking)
    done = sae("extract", *both, "--dataset", text, "--name", "s", *more)
    assert done.status == 0, done.err
    assert "gemma2 and " in done.err and "share 64 tokens; 1 token of one alone" in done.err
    alone = sae("extract", "--model", thinking, "--dataset", text, "--name", "alone", *more)
    assert alone.status == 0, alone.err
    rows, columns = read(sae.home, "s-thinking-l1-resid_post")
    own_rows, own_columns = read(sae.home, "alone")
    assert columns == own_columns
    np.testing.assert_allclose(rows, own_rows, rtol=2e-2, atol=1e-2)
    (tmp_path / "other.txt").write_text("abc\n\nab<think>c")
    for models in (both, both[2:] + both[:2]):
        done = sae("extract", *models, "--dataset", tmp_path / "other.txt", *more)
        assert done.status == 1 and "the token <think>" in done.err, done.err


def test_rows_that_not_all_can_store_end_the_extraction(
    sae: CommandLine, overflowing, tmp_path: Path
):
    (tmp_path / "c.txt").write_text("\n\n".join(["c" * 15] * 800))
    done = sae(
        f"extract --model {overflowing} --dataset {tmp_path}/c.txt "
        "--layer 1 --site mlp_in --site resid_pre --context 16 --dtype float16"
    )
    assert done.status == 1
    assert "at all 2 hook points" in done.err
    assert not list((sae.home / "activations").iterdir())


def test_a_norm_limit_takes_one_hook_point(sae: CommandLine, model, text):
    words = ("extract", "--model", model, "--dataset", text, "--max-norm-multiple", "3")
    done = sae(*words, *SEVERAL)
    assert done.status == 2 and "--max-norm-multiple" in done.err


def test_stores_of_different_rows_are_refused(sae: CommandLine, model, text):
    words = ("extract", "--model", model, "--dataset", text)
    words += (*split("--rows 300 --shard-rows 60 --name s --site mlp_in --site mlp_out"),)
    assert sae(*words).status == 0
    path = sae.home / "activations" / "s-l1-mlp_out" / "store.json"
    document = json.loads(path.read_text())
    document["shards"][2]["resume"]["skip"] += 1
    path.write_text(json.dumps(document))
    assert "s-l1-mlp_in and s-l1-mlp_out do not hold the same rows" in sae(*words).err


def test_a_name_of_several_stores_is_their_prefix(sae: CommandLine, model, text):
    words = ("extract", "--model", model, "--dataset", text, "--rows", "100", "--json")
    found = sae(*words, *SEVERAL, "--name", "mine").json["stores"]
    assert [each["name"] for each in found] == [
        f"mine-l{n}-{site}" for n in "02" for site in ("resid_post", "mlp_out")
    ]
    refused = sae(*words, "--layer", "2", "--name", "mine-l2-resid_post").err
    assert (
        "there is a store named 'mine-l2-resid_post' already, made from something else" in refused
    )
    out = sae(
        f"extract --model {model} --dataset {text} --rows 100", *SEVERAL, "--name", "mine"
    ).out
    assert out.count("stored already, by the same request") == 4


@pytest.mark.slow
@pytest.mark.parametrize("extra", [(), ("--packed",)])
def test_rows_depend_on_the_batch_size_only_by_rounding(sae: CommandLine, model, text, extra):
    words = (
        f"extract --model {model} --dataset {text} --layer 1 --context 16 --dtype float32".split()
    )
    for size in ("auto", "1", "3", "1000"):
        assert sae(*words, *extra, "--batch-size", size, "--name", size).status == 0
    rows, columns = read(sae.home, "auto")
    for size in ("1", "3", "1000"):
        found, found_columns = read(sae.home, size)
        assert found_columns == columns
        np.testing.assert_allclose(found, rows, rtol=1e-4, atol=1e-5)
        assert sae(*words, *extra, "--batch-size", size, "--name", "auto", "--json").json["cached"]


@pytest.mark.slow
def test_packed_rows_match_the_model_on_joined_documents(sae: CommandLine, model, text):
    words = (
        f"extract --model {model} --dataset {text} --layer 1 --context 16 --dtype float32".split()
    )
    document = sae(*words, "--packed", "--name", "packed", "--json").json
    rows, columns = read(sae.home, "packed")
    plain = sae(*words, "--name", "plain", "--json").json
    assert (plain["rows"], sorted(read(sae.home, "plain")[1]["token_id"])) == (
        document["rows"],
        sorted(columns["token_id"]),
    )
    auto = AutoModel.from_pretrained(model, attn_implementation="eager").eval()
    starts = [
        i
        for i in range(len(rows))
        if i == 0 or columns["position"][i] <= columns["position"][i - 1]
    ]
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        window = torch.ones(
            1, columns["position"][end - 1] + 1, dtype=torch.int64
        )  # BOS wherever no token was stored
        window[0, columns["position"][start:end]] = torch.tensor(columns["token_id"][start:end])
        with torch.no_grad():
            states = auto(window, output_hidden_states=True).hidden_states[2][0]
        np.testing.assert_allclose(
            rows[start:end], states[columns["position"][start:end]], rtol=1e-4, atol=1e-5
        )
    assert len(starts) < document["rows"] / 12  # windows of 16, and not of the documents' lengths
    make_run(
        sae.home,
        "run",
        SAE(
            torch.eye(WIDTH),
            torch.zeros(WIDTH),
            torch.eye(WIDTH),
            torch.zeros(WIDTH),
            TopK(k=WIDTH),
        ),
        data="packed",
    )
    measured = sae("eval", "run", "--model", model, "--json").json["runs"][0]
    assert measured["ce_spliced"] == pytest.approx(measured["ce_clean"], rel=1e-4)


def test_empty_and_short_texts_are_left_out_and_counted(sae: CommandLine, model, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(
            json.dumps({"text": text}) + "\n"
            for text in ["abc", "", "  ", "a", "abcdef", None, "ab"]
        )
    )
    words = ("extract", "--model", model, "--dataset", path, "--min-tokens", "3", "--name", "s")
    document = sae(*words, "--json").json
    assert document["rows"] == 9
    assert document["dropped"] == {"empty_texts": 3, "short_texts": 2, "special": 2}
    out = " ".join(sae(*words).out.split())
    assert "dropped: short_texts │ 2 texts" in out and "dropped: special │ 2 (18%)" in out
    assert read(sae.home, "s")[1]["document"] == [0] * 3 + [4] * 6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_forward_pass_runs_in_the_given_precision(sae: CommandLine, model, text, dtype):
    words = f"extract --model {model} --dataset {text} --layer 1 --dtype float32 --json".split()
    automatic, exact = sae(*words).json, sae(*words, "--model-dtype", "float32").json
    assert exact["cached"] and exact["name"] == automatic["name"]
    half = sae(*words, "--model-dtype", dtype).json
    assert half["name"] != exact["name"]
    assert store(sae.home, half["name"]).meta.source["model_dtype"] == dtype
    rows, full = read(sae.home, half["name"])[0], read(sae.home, exact["name"])[0]
    rounded = torch.tensor(rows).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(rows, rounded)
    assert 1e-4 < np.abs(rows - full).max() / np.abs(full).max() < 0.1


def test_without_a_terminal_a_line_shows_progress(sae: CommandLine, model, text):
    sae.monkeypatch.setattr("saecli.base.console.PLAIN_INTERVAL", 0.0)
    done = sae(f"extract --model {model} --dataset {text} --rows 600 --context 16 --batch-size 4")
    line = next(line for line in done.err.splitlines() if "tokens/s" in line)
    for words in (" of 600 rows, ", " rows/s, ", " left  ", " tokens/s, ", " rows written, ", " B"):
        assert words in line
