"""Commands on stores and runs: `sae import`, `sae list`, `sae rm` and `sae export` as a shell runs them."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import CommandLine, change_json, make_run, make_store, random_sae, some_rows
from launching import signalled
from sklearn.datasets import load_digits
from storing import collect

import saecli
from saecli.base.files import lock_folder
from saecli.sae.activations import Activation, JumpRelu, MatchingPursuit, Relu, ReluTopK, TopK
from saecli.sae.formats import load, recognise
from saecli.store.schema import read_meta


def stored(sae: CommandLine, name: str) -> np.ndarray:
    return collect(saecli.open_store(name, home=sae.home).split("all").sequential(100))


def test_import_of_the_digits(sae):
    document = sae("import", "digits", "--json").json
    keys = ["name", "rows", "d_in", "dtype", "shards", "cached"]
    assert document.keys() == {*keys, "path", "dropped", "norms", "source"}
    assert [document[key] for key in keys] == ["digits", 1797, 64, "float32", 1, False]
    images = load_digits().data
    lengths = np.linalg.norm(images, axis=1)
    measures = {"mean": lengths.mean(), "max": lengths.max(), "median": np.median(lengths)}
    norms = document["norms"]
    assert {name: norms[name] for name in measures} == pytest.approx(measures)
    assert (norms["rows"], norms["massive_rows"]) == (1797, 0)
    np.testing.assert_array_equal(stored(sae, "digits"), images)


def test_an_import_again_is_a_cache_hit_another_of_its_name_refused(sae, tmp_path):
    rows = np.random.default_rng(0).standard_normal((300, 5), np.float32)
    np.save(tmp_path / "a.npy", rows)
    assert sae("import", tmp_path / "a.npy", "--json").json["cached"] is False
    made = (sae.home / "activations" / "a" / "store.json").stat().st_mtime_ns
    assert sae("import", tmp_path / "a.npy", "--json").json["cached"] is True
    assert (sae.home / "activations" / "a" / "store.json").stat().st_mtime_ns == made
    np.save(tmp_path / "a.npy", -rows)
    for words in ([], ["--dtype", "bfloat16"]):
        sae("import", tmp_path / "a.npy", *words).fails(1, "--name")
    other = sae("import", tmp_path / "a.npy", "--name", "b", "--dtype", "bfloat16", "--json")
    assert other.json["dtype"] == "bfloat16"
    np.testing.assert_array_equal(stored(sae, "a"), rows)


def test_import_of_many_files_as_a_shell_and_as_a_pattern_name_them(sae, tmp_path):
    folder, rows = tmp_path / "acts", np.random.default_rng(0).standard_normal((36, 4), np.float32)
    folder.mkdir()
    for number in range(12):
        np.save(folder / f"{number}.npy", rows[3 * number :][:3])
    done = sae("import", folder / "*.npy", "--json")
    assert (done.json["name"], done.json["source"]["file"]) == ("acts", "0.npy and 11 more")
    assert "12 arrays; whole arrays are held out as test rows" in done.err
    np.testing.assert_array_equal(stored(sae, "acts"), rows)
    assert sae("import", folder, "--json").json["cached"] is True
    expanded = sorted(folder.glob("*.npy"), key=str)  # 10 before 9, as a shell does
    sae("import", *expanded).fails(1, "made from something else")
    assert sae("import", *expanded, "--name", "other", "--json").json["rows"] == 36
    np.save(folder / "10.npy", rows[:3, :3])
    sae("import", folder / "*.npy").fails(1, "10.npy", "4 dimensions, got 2 axes of float32, 3")


def test_import_warns_of_rows_that_may_be_no_activations(sae, tmp_path):
    rows = np.ones((20, 6, 4), np.float32)
    rows[:, 4:] = 0
    np.savez(tmp_path / "a.npz", x=rows, attention_mask=rows[:, :, 0].astype(int), n=[3])
    words = ["import", tmp_path / "a.npz", "--flatten", "positions"]
    done = sae(*words, "--json")
    assert (done.json["rows"], done.json["dropped"]) == (120, {})
    for said in ("add --mask attention_mask", "40 of 120 rows are all 0", "--drop-zeros"):
        assert said in done.err
    for option, reason in (("--mask=attention_mask", "masked"), ("--drop-zeros", "all_zero")):
        kept = sae(*words, option, "--name", reason, "--json")
        assert (kept.json["rows"], kept.json["dropped"]) == (80, {reason: 40})


def test_rows_that_are_not_finite_are_dropped_and_said(sae, tmp_path):
    rows = np.ones((40, 3))
    rows[7] = np.nan
    rows[9, 1] = 1e300
    np.save(tmp_path / "a.npy", rows)
    done = sae("import", tmp_path / "a.npy", "--json")
    assert (done.json["rows"], done.json["dropped"]) == (38, {"nonfinite": 2})
    np.save(tmp_path / "b.npy", np.full((4, 3), np.inf))
    sae("import", tmp_path / "b.npy").fails(1, "no rows to store", "4 nonfinite")
    assert "a: 2 rows left out, with numbers that are NaN or too large for float32" in done.err
    np.save(tmp_path / "d.npy", np.vstack([np.eye(20), np.eye(20) * 1e5]))
    half = sae("import", tmp_path / "d.npy", "--dtype", "float16")
    assert "d: 20 rows left out" in half.err
    assert "for float16; check where they come from, or give a wider --dtype" in half.err


def test_a_file_whose_name_is_no_utf_8_is_imported_by_another(sae, tmp_path):
    np.save(tmp_path / "a\udcff.npy", np.ones((30, 4)))
    assert sae("import", tmp_path / "a\udcff.npy").status == 2
    assert sae("import", tmp_path / "a\udcff.npy", "--name", "a").status == 0
    assert sae("list --json").json["stores"][0]["source"]["file"] == "a\\udcff.npy"


def test_list_shows_stores_and_runs_newest_first(sae):
    sae("import", "digits")
    sae("import", "digits", "--name", "half", "--dtype", "float16", "--shard-rows", "1000")
    make_run(sae.home, "first", random_sae(), data="digits", created="2026-01-01")
    make_run(sae.home, "second", random_sae(), data="digits", created="2026-01-02", complete=False)
    document = sae("list", "--json").json
    stores = [[store[key] for key in ("name", "dtype", "shards")] for store in document["stores"]]
    assert stores == [["half", "float16", 2], ["digits", "float32", 1]]
    runs = [[run[key] for key in ("name", "state", "data")] for run in document["runs"]]
    assert runs == [["second", "unfinished", "digits"], ["first", "complete", "digits"]]
    for entry in (*document["stores"], *document["runs"]):
        files = [path for path in Path(entry["path"]).rglob("*") if path.is_file()]
        assert entry["bytes"] == sum(path.stat().st_size for path in files)
    shown = sae("list").out
    for word in ("half", "digits", "first", "second", "unfinished", "1,797", "float16"):
        assert word in shown


def test_check_names_every_damaged_shard_and_unreadable_store_once(sae):
    sae("import", "digits", "--shard-rows", "600")
    assert "checked 1 store, 3 shards: all whole" in sae("list", "--check").err
    shards = sorted((sae.home / "activations" / "digits" / "shards").iterdir())
    for path in shards:
        path.write_bytes(b"damaged")
    (sae.home / "activations" / "other").mkdir()
    (sae.home / "activations" / "other" / "store.json").write_text("{")
    done, document = sae("list", "--check"), sae("list", "--check", "--json")
    assert (done.status, document.status, sae("list").status) == (1, 1, 0)
    for name in (*map(str, shards), "store.json"):
        assert (done.out + done.err).count(name) == 1
    assert len(json.loads(document.out)["problems"]) == 4
    assert "found 4 problems" in done.err and done.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "shard_rows", "written"),
    [
        ("import", 1000, "00000.h5"),
        ("import", 1000, "00002.h5"),
        pytest.param("extract", 500, "00002.h5", marks=pytest.mark.long),
    ],
)
def test_a_stopped_command_says_what_is_saved(sae, tmp_path, command, shard_rows, written):
    source = ["--model", "tiny-gemma2", "--rows", "5000", "--name", "s"]
    if command == "import":
        source = [tmp_path / "s.npy"]
        np.save(source[0], np.tile(np.arange(16, dtype=np.float32), (5000, 1)))
    words = [command, *source, "--shard-rows", shard_rows]
    process = signalled(sae.home, words, written, 1, signal.SIGINT)
    assert process.returncode == 130 and "Traceback" not in process.said
    folder = sae.home / "activations" / "s"
    rows = read_meta(folder).rows
    assert rows > 0
    assert f"stopped; {rows:,} rows are saved" in process.said
    stores = sae("list", "--json").json["stores"]
    assert [(s["state"], s["rows"]) for s in stores] == [("unfinished", rows)]
    resumed = sae(*words, "--json")
    assert resumed.json["rows"] == 5000
    assert f"going on after {rows:,} rows" in resumed.err


@pytest.fixture
def filled(sae: CommandLine) -> CommandLine:
    for name in ("rows", "both"):
        make_store(sae.home, name, some_rows(300))
    for name in ("first", "both"):
        make_run(sae.home, name, random_sae(), data="rows")
    return sae


def left(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.glob("*/*")}


ALL = {"activations/rows", "activations/both", "runs/first", "runs/both"}


def test_what_is_removed_is_shown_and_asked_for_first(filled: CommandLine):
    filled.monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    done = filled("rm", "rows")
    for words in ("store rows: ", "trained on it: both, first", "remove 1 folder?", "nothing was"):
        assert words in done.err
    assert (done.status, done.out, left(filled.home)) == (0, "", ALL)
    filled.monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    done = filled("rm", "rows", "first")
    assert (done.status, left(filled.home)) == (0, {"activations/both", "runs/both"})
    assert "remove 2 folders?" in done.err and done.out.startswith("removed 2 folders, ")


def test_nobody_is_asked_with_yes_and_the_kind_tells_two_of_a_name_apart(filled: CommandLine):
    done = filled("rm", "both", "--kind", "run", "--yes", "--json")
    assert [(entry["kind"], entry["name"]) for entry in done.json["removed"]] == [("run", "both")]
    assert done.json["bytes"] == done.json["removed"][0]["bytes"] > 1000
    assert left(filled.home) == ALL - {"runs/both"}
    assert filled("rm", "both", "-y").status == 0
    assert left(filled.home) == {"activations/rows", "runs/first"}
    assert filled("rm", "first", "rows", "-y").status == 0 and not left(filled.home)


def test_what_is_being_written_stays(filled: CommandLine):
    lock_folder(filled.home / "runs" / "first")  # held until the process ends
    for name, said in (("first", "another process is writing it"), ("rows", "or training on it")):
        filled("rm", name, "--yes").fails(1, said)
        assert left(filled.home) == ALL


def test_an_unreadable_folder_and_a_link_are_removed_by_name(filled: CommandLine, tmp_path: Path):
    (filled.home / "runs" / "first" / "run.json").unlink()
    (filled.home / "activations" / "linked").symlink_to(filled.home / "activations" / "rows")
    assert filled("rm", "first", "linked", "--yes").status == 0
    assert left(filled.home) == ALL - {"runs/first"}


QUICK = ("--d-sae", "24", "--epochs", "1", "--solver", "sgd")


def test_import_drops_outliers_and_says_so(sae: CommandLine, tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3000, 16)).astype(np.float32)
    rows[rng.choice(3000, 40, replace=False)] *= 50
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    high = norms > 10 * np.median(norms)
    np.save(tmp_path / "a.npy", rows)
    words = ("import", tmp_path / "a.npy", "--max-norm-multiple", "10")
    document = sae(*words, "--json").json
    assert (document["rows"], document["dropped"]) == (2960, {"high_norm": 40})
    assert document["norms"]["max"] == pytest.approx(norms[~high].max())
    (listed,) = sae("list", "--json").json["stores"]
    assert (listed["norms"], listed["dropped"]) == (document["norms"], document["dropped"])
    done = sae(*words)
    norms_shown = [f"{name} {document['norms'][name]:.4g}" for name in ("median", "mean", "max")]
    assert ", ".join(norms_shown) in done.out
    assert "stored already" in done.out
    assert "dropped: high_norm │ 40" in " ".join(done.out.split())
    np.testing.assert_array_equal(stored(sae, "a"), rows[~high])
    for other in ((), ("--max-norm-multiple", "11")):
        assert "made from something else" in sae(*words[:2], *other).err


def test_a_store_outside_the_home_is_trained_on_and_found_again(sae: CommandLine, tmp_path: Path):
    make_store(tmp_path / "other", "rows", some_rows(300))
    folder = tmp_path / "other" / "activations" / "rows"
    assert sae("train", "--data", folder, *QUICK, "--name", "run").status == 0
    run = sae.home / "runs" / "run"
    assert json.loads((run / "run.json").read_text())["data"] == str(folder)
    assert sae("eval", "run", "--json").json["runs"][0]["rows"] > 0
    assert sae("train", "--config", run / "config.toml", "--name", "again").status == 0
    weights = (sae.home / "runs" / name / "sae.safetensors" for name in ("run", "again"))
    assert len({path.read_bytes() for path in weights}) == 1
    assert saecli.evaluate("run", data=str(folder), home=sae.home)["rows"] > 0
    change_json(run / "run.json", complete=False, result=None)
    assert sae("train", "--resume", "--name", "run").status == 0


def test_the_folder_of_a_store_in_the_home_is_its_name(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(300))
    sae.monkeypatch.chdir(sae.home)
    assert sae("train", "--data", "activations/rows", *QUICK, "--name", "run").status == 0
    assert json.loads((sae.home / "runs" / "run" / "run.json").read_text())["data"] == "rows"
    assert sae("train", "--data", "rows", "--data", "activations/rows", *QUICK).status == 2


def test_a_name_in_the_home_comes_before_a_folder_here(sae: CommandLine, tmp_path: Path):
    make_store(sae.home, "rows", some_rows(300))
    make_store(tmp_path, "rows", some_rows(200))
    sae.monkeypatch.chdir(tmp_path / "activations")
    named = sae("train", *QUICK, "--name", "run", "--data", "rows", "--json")
    assert named.json["rows_train"] > 200
    sae.monkeypatch.chdir("rows")  # has a store.json, which a store's name must not find
    newest = sae("train", *QUICK, "--name", "newest", "--json")
    assert newest.json["rows_train"] > 200
    assert sae("train", "--data", tmp_path).status == 1


@pytest.mark.long
def test_trainers_at_once_get_a_run_each_and_end_alike(sae: CommandLine):
    assert sae("import", "digits").status == 0
    words = ["train", "--epochs", "3", "--d-sae", "16", "--json"]
    alone = sae(*words, "--name", "alone").json
    command, pipe = [sys.executable, "-m", "saecli", "--home", sae.home, *words], subprocess.PIPE
    processes = [subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe) for _ in range(3)]
    documents = []
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        documents.append(json.loads(out))
    assert {run["run"] for run in documents} == {f"pam-sgd-batchtopk-{n}" for n in (1, 2, 3)}
    assert all(run["final"] == alone["final"] for run in documents)


FORMATS = ["saelens", "sparsify", "dictionary-learning"]


@pytest.mark.parametrize(
    ("name", "activation"),
    [*((name, ReluTopK(k=4)) for name in FORMATS), ("saelens", JumpRelu())],
    ids=lambda value: getattr(value, "name", value),
)
def test_exports_decode_alike(sae: CommandLine, tmp_path: Path, name: str, activation: Activation):
    make_run(sae.home, "run", random_sae(activation))
    done = sae("export", "run", "--to", name, "--out", tmp_path / "deep" / "out", "--json")
    assert done.json == {
        "run": "run",
        "format": name,
        "path": str(tmp_path / "deep" / "out"),
        "activation": activation.name,
        "written_as": activation.name,
        "files": sorted(path.name for path in (tmp_path / "deep" / "out").iterdir()),
    }
    assert recognise(tmp_path / "deep" / "out") == name
    rows = torch.from_numpy(some_rows(100))
    read = load(tmp_path / "deep" / "out").sae
    torch.testing.assert_close(read(rows), random_sae(activation)(rows), atol=1e-4, rtol=1e-5)


def test_a_tilde_is_the_users_home_folder(sae: CommandLine, tmp_path: Path):
    sae.monkeypatch.setenv("HOME", str(tmp_path))
    sae.monkeypatch.chdir(tmp_path)
    mine = random_sae(Relu())
    make_run(sae.home, "run", mine)
    saecli.save_sae(mine, "~/saved")
    assert sae("--home=~/home export run --to saelens --out=~/written").status == 0
    for name in ("saved", "written"):
        assert sae(f"export ~/{name} --to saelens --out=~/again/{name}").status == 0
        assert recognise(tmp_path / "again" / name) == "saelens"
    assert not (tmp_path / "~").exists()
    for line in ("eval ~nobody-here/x", "eval run --data ~nobody-here/x"):
        sae(line).fails(1, "named '~nobody-here/x'")


def test_a_signed_topk_is_written_clipped_with_a_note(sae: CommandLine, tmp_path: Path):
    mine = random_sae(TopK(k=4))
    mine.b_enc.sub_(4)  # so that many rows have fewer than 4 positive pre-activations
    make_run(sae.home, "run", mine)
    done = sae("export", "run", "--to", "saelens", "--out", tmp_path / "out", "--json")
    assert done.json["written_as"] == "relu-topk" and "negative codes become 0" in done.err
    x = torch.from_numpy(some_rows(100))
    codes = mine.encode(x)
    assert (codes < 0).any()
    torch.testing.assert_close(load(tmp_path / "out").sae.encode(x), codes.relu())


def test_other_formats_are_refused_by_name(sae: CommandLine, tmp_path: Path):
    with pytest.raises(saecli.SaeError, match=r"format must be one of saelens, .*, got 'x'"):
        saecli.save_sae(random_sae(), tmp_path / "x", "x")
    sae("export", "run", "--to", "dictionary_learning", "--out", tmp_path / "new").fails(
        2, "did you mean dictionary-learning?"
    )


@pytest.mark.parametrize(
    ("name", "activation", "advice"),
    [
        ("sparsify", JumpRelu(), "written as saelens or dictionary-learning or native"),
        ("saelens", MatchingPursuit(k=4), "written as native"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_a_format_lacks_is_refused_by_name(sae, tmp_path, name, activation, advice):
    make_run(sae.home, "run", random_sae(activation))
    sae("export", "run", "--to", name, "--out", tmp_path / "out").fails(
        1, f"{name} cannot express the activation {activation.name}", advice
    )
    assert not (tmp_path / "out").exists()
