"""`sae export`: what it writes reconstructs alike, and what it cannot is refused, or a topk clipped."""

from pathlib import Path

import pytest
import torch
from homes import CommandLine, make_run, random_sae, some_rows

import saecli
from saecli.sae.activations import Activation, JumpRelu, MatchingPursuit, Relu, ReluTopK, TopK
from saecli.sae.formats import load, recognise

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
