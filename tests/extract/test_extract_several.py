"""`sae extract` with several layers and sites, packed windows, batches of any size, and memory that runs out."""

import json
import shutil
import signal
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import CommandLine
from launching import launched
from storing import assert_same_pass
from tiny_models import save_model, stored
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import saecli
from saecli.store.reader import ActivationStore
from saecli.store.schema import read_meta

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
    line = f"extract --model {model} --dataset {text} --context 16 --rows 900 --batch-size 4"
    together = sae(line, "--json", *SEVERAL).json["stores"]
    assert together[0].keys() >= {"name", "path", "rows", "d_in", "dtype", "shards", "cached"}
    assert [found["cached"] for found in together] == [False] * 4
    hashes = {found["name"].rpartition("-")[2] for found in together}
    assert len(hashes) == 1  # of the request
    labels = [f"l{layer}-{site}" for layer in "02" for site in ("mlp_out", "resid_post")]
    places = product("02", ("resid_post", "mlp_out"))
    for (layer, site), own in zip(places, together, strict=True):
        alone = sae(f"{line} --json --layer {layer} --site {site}").json
        assert not alone["cached"] and alone["name"] != own["name"]
        metas = [store(sae.home, found["name"]).meta for found in (alone, own)]
        differing = ("source", "request_hash")
        assert_same_pass(Path(own["path"]), Path(alone["path"]), but_for=differing)
        beside = [label for label in labels if label != f"l{layer}-{site}"]
        assert metas[1].source == {**metas[0].source, "beside": beside}
    reversed_order = "--site mlp_out --site resid_post --layer 2 --layer 0"
    again = sae(f"{line} --json {reversed_order}").json["stores"]
    assert all(found["cached"] for found in again)
    every = sae(f"{line} --json --layer all --site resid_post --name all").json["stores"]
    assert [found["name"] for found in every] == [f"all-l{layer}-resid_post" for layer in range(3)]
    assert {found["name"] for found in again} == {found["name"] for found in together}
    assert "stores of the same tokens" in sae(line, *SEVERAL).out
    assert sae(f"{line} --json --layer 0 --layer 0").json["cached"]  # one store, said as one


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
    line = (
        f"extract --model {overflowing} --dataset {text} --layer 1 --context 16 --rows 500 "
        "--shard-rows 60 --dtype float16 --name s --site resid_pre --site mlp_in --json"
    )
    pre, mlp = sae(line).json["stores"]
    assert pre["dropped"] == mlp["dropped"] and pre["dropped"]["nonfinite"] > 20
    assert read(sae.home, pre["name"])[1] == read(sae.home, mlp["name"])[1]
    columns = read(sae.home, mlp["name"])[1]
    assert LETTER_C not in columns["token_id"] and len(columns["token_id"]) == 500
    first = shutil.move(pre["path"], sae.home / "first")
    meta = store(sae.home, mlp["name"]).meta
    assert [found["cached"] for found in sae(line).json["stores"]] == [False, True]
    assert_same_pass(Path(pre["path"]), first)
    assert store(sae.home, mlp["name"]).meta == meta


def test_a_row_of_high_norm_in_one_store_is_dropped_from_all(sae: CommandLine, model, text):
    line = f"extract --model {model} --dataset {text} --context 16 --dtype float32 --json"
    sites = ("--layer", "0", "--site", "resid_post", "--site", "mlp_out")
    names = ("l0-mlp_out", "l0-resid_post")
    assert sae(line, "--name", "all", *sites).status == 0
    every = [read(sae.home, f"all-{name}") for name in names]
    norms = [np.linalg.norm(rows.astype(np.float64), axis=1) for rows, _ in every]
    fits = [own <= np.median(own) for own in norms]
    assert not (fits[0] <= fits[1]).all() and not (fits[1] <= fits[0]).all()
    kept = fits[0] & fits[1]
    made = sae(line, "--name", "few", "--max-norm-multiple", "1", *sites).json["stores"]
    for (rows, columns), own, name in zip(every, norms, names, strict=True):
        found, found_columns = read(sae.home, f"few-{name}")
        np.testing.assert_allclose(found, rows[kept], rtol=1e-5, atol=1e-6)
        assert found_columns == {key: np.array(own)[kept].tolist() for key, own in columns.items()}
        meta = store(sae.home, f"few-{name}").meta
        assert meta.median_norm == pytest.approx(np.median(own), rel=1e-5)
    assert [each["dropped"]["high_norm"] for each in made] == [int((~kept).sum())] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* times the median norm")
def test_a_row_that_one_model_cannot_store_both_drop(sae: CommandLine, model, overflowing, text):
    def by_token(name: str) -> dict[tuple[int, ...], np.ndarray]:
        rows, columns = read(sae.home, name)
        return dict(zip(zip(*columns.values(), strict=True), rows, strict=True))

    line = f"extract --dataset {text} --layer 1 --context 16 --rows 300 --dtype float16 --json"
    both = f"--model {model} --model {overflowing} --name s"
    first, second = sae(f"{line} {both}").json["stores"]
    names = [f"s-{own}-l1-resid_post" for own in ("gemma2", "overflowing")]
    assert [first["name"], second["name"]] == names
    assert first["dropped"]["nonfinite"] == second["dropped"]["nonfinite"] > 10
    columns = read(sae.home, second["name"])[1]
    assert read(sae.home, first["name"])[1] == columns and LETTER_C not in columns["token_id"]
    for found, own in ((first, model), (second, overflowing)):
        alone = by_token(sae(f"{line} --model {own}").json["name"])
        together = by_token(found["name"])
        keys = [*alone.keys() & together.keys()]
        assert len(keys) > 200
        pairs = [[rows[key] for key in keys] for rows in (together, alone)]
        np.testing.assert_allclose(*pairs, rtol=2e-3, atol=1e-3)
    assert all(found["cached"] for found in sae(f"{line} {both}").json["stores"])
    models, options = [str(overflowing), str(model)], {"dataset": str(text), "home": sae.home}
    stores = saecli.extract(models, layer=1, rows=50, **options)
    assert [store.meta.source["model"] for store in stores] == [str(overflowing), str(model)]


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ("model", "--model names {} twice; name each model once"),
        ("plain", "got windows that begin with the special tokens [1] and []"),
        ("tiny-gemma2", "expected one tokenizer, got 64 and 2,048 tokens"),
    ],
)
def test_models_read_the_same_tokens(sae: CommandLine, model, text, tmp_path, second, sentence):
    plain = save_model(tmp_path / "plain", "llama", bos=False)
    other = {"model": model, "plain": plain}.get(second, second)
    words = ("--model", model, "--model", other, "--dataset", text, "--prepend-bos", "off")
    sae("extract", *words).fails(2, sentence.format(other))


def test_models_share_tokens_but_for_added_ones(sae: CommandLine, model, text, tmp_path: Path):
    config = AutoConfig.from_pretrained(model)
    config.vocab_size += 1
    thinking = save_model(tmp_path / "thinking", config)
    tokenizer = AutoTokenizer.from_pretrained(thinking)
    tokenizer.add_tokens("<think>")
    tokenizer.save_pretrained(thinking)
    more = ("--layer", "1", "--rows", "200", "--context", "16")
    both = ("--model", model, "--model", thinking)
    sae("extract", *both, "--dataset", text, "--name", "s", *more).succeeds()
    sae("extract", "--model", thinking, "--dataset", text, "--name", "alone", *more).succeeds()
    rows, columns = read(sae.home, "s-thinking-l1-resid_post")
    own_rows, own_columns = read(sae.home, "alone")
    assert columns == own_columns
    np.testing.assert_allclose(rows, own_rows, rtol=2e-2, atol=1e-2)


def test_rows_that_not_all_store_end_the_extraction(sae: CommandLine, overflowing, tmp_path: Path):
    (tmp_path / "c.txt").write_text("\n\n".join(["c" * 15] * 800))
    sae(
        f"extract --model {overflowing} --dataset {tmp_path}/c.txt "
        "--layer 1 --site mlp_in --site resid_pre --context 16 --dtype float16"
    ).fails(1, "is finite in float16 at every hook point")


def test_a_name_of_several_stores_is_their_prefix(sae: CommandLine, model, text):
    line = f"extract --model {model} --dataset {text} --rows 100"
    found = sae(f"{line} --json --name mine", *SEVERAL).json["stores"]
    names = [f"mine-l{n}-{site}" for n in "02" for site in ("resid_post", "mlp_out")]
    assert [own["name"] for own in found] == names
    refused = sae(f"{line} --layer 2 --name mine-l2-resid_post").err
    assert "a store named 'mine-l2-resid_post' already, made from something else" in refused
    out = sae(f"{line} --name mine", *SEVERAL).out
    assert "stored already, by the same request: 4 stores" in out


def test_empty_texts_are_left_out_and_counted(sae: CommandLine, model, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    texts = ["abc", "", "  ", "a", "abcdef", None, "ab"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ("extract", "--model", model, "--dataset", path, "--name", "s")
    document = sae(*words, "--json").json
    assert document["rows"] == 12
    assert document["dropped"] == {"empty_texts": 3, "special": 4}
    out = " ".join(sae(*words).out.split())
    assert "dropped: empty_texts │ 3" in out and "dropped: special │ 4" in out
    assert read(sae.home, "s")[1]["document"] == [0] * 3 + [3] + [4] * 6 + [6] * 2


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_rows_of_an_unfinished_shard_outlast_a_signal(sae: CommandLine, what: signal.Signals):
    """Twice, each in the middle of what follows; of a kill the whole shards stay."""
    size = 2000 if what == signal.SIGKILL else 30_000
    words = ("extract", "--model", "tiny-gemma2", "--rows", "26000", "--shard-rows", str(size))
    folder, saved = sae.home / "activations" / "stopped", 0
    for _ in range(2):
        with launched([sys.executable], "--home", sae.home, *words, "--name", "stopped") as started:
            more = saved + 4200
            started.until(lambda more=more: rows_written(folder) > more)
            started.process.send_signal(what)
            done = started.done()
        before, saved = saved, read_meta(folder).rows
        if what == signal.SIGKILL:
            assert done.status == -signal.SIGKILL and saved % size == 0 and saved > before
        else:
            said = f"stopped; {saved:,} rows are saved, and the same command goes on from there"
            assert (done.status, done.err.splitlines()[-1]) == (130, said)
            assert saved >= before + 4096
    assert sae(*words, "--name", "stopped").status == sae(*words, "--name", "whole").status == 0
    assert_same_pass(folder, folder.with_name("whole"), but_for=("shards",))


def rows_written(folder: Path) -> int:
    """The rows of the shards, whole or not, of 256 bytes each."""
    return sum(path.stat().st_size for path in folder.glob("shards/*")) // 256


def test_without_a_terminal_a_line_shows_progress(sae: CommandLine, model, text):
    sae.monkeypatch.setattr("saecli.base.console.PLAIN_INTERVAL", 0.0)
    done = sae(f"extract --model {model} --dataset {text} --rows 600 --context 16 --batch-size 4")
    line = next(line for line in done.err.splitlines() if "tokens/s" in line)
    for words in (" of 600 rows, ", " rows/s, ", " left  ", " tokens/s"):
        assert words in line
