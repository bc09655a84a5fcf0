"""Homes for tests of commands: real stores and run folders, and the command line run in this process."""

import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import storing
import torch
from safetensors.torch import load_file

import saecli
from saecli.cli.main import main
from saecli.model import TINY_GEMMA2
from saecli.model.saes import fold_in
from saecli.sae import formats
from saecli.sae.activations import ACTIVATIONS, Activation, Relu, activation_to_json
from saecli.sae.dictionary import SAE
from saecli.sae.formats import FORMATS, SavedSAE, save_native
from saecli.store.origin import Origin

D, F, PREFIXES = 8, 20, (3, 8, 20)
RESIDUAL = {"model": "gpt2", "layer": 3, "site": "resid_post"}
MLP = {"model": "gpt2", "layer": 3, "site": "mlp_in", "target_layer": 3, "target_site": "mlp_out"}


def some_rows(rows: int = 3000, d_in: int = D, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, d_in)) + 1.5).astype(np.float32)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fvu(y_hat: torch.Tensor, y: torch.Tensor) -> float:
    return ((y_hat - y).square().sum() / (y - y.mean(0)).square().sum()).item()


def reconstruction_oracle(
    x: torch.Tensor, x_hat: torch.Tensor, z: torch.Tensor
) -> dict[str, float]:
    """The measures of reconstructions and codes, by numpy in float64."""
    x, x_hat, z = (t.numpy().astype(np.float64) for t in (x, x_hat, z))
    residual = ((x_hat - x) ** 2).sum(1)
    variance = x.var(0).sum()
    cosine = (x * x_hat).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(x_hat, axis=1)
    return {
        "rows": len(x),
        "mse": residual.mean() / x.shape[1],
        "fvu": residual.mean() / variance,
        "metric_fvu": residual.mean() / variance,  # of raw rows
        "explained_variance": 1 - residual.mean() / variance,
        "cosine": cosine.mean(),
        "l0": (z != 0).sum(1).mean(),
        "l1": np.abs(z).sum(1).mean(),
        "silent_fraction": (~(z != 0).any(0)).mean(),
    }


def make_store(home: Path, name: str, rows: np.ndarray, **meta: Any) -> np.ndarray:
    """The rows as a store of a home, in one shard."""
    sizes = {"block": len(rows), "shard_rows": len(rows), "chunk_rows": 256}
    meta = {"source": {"kind": "array"}, "request_hash": name, **sizes, **meta}
    storing.make_store(home / "activations" / name, rows, **meta)
    return rows


def random_sae(activation: Activation | None = None, d_in: int = D, seed: int = 0) -> SAE:
    activation = activation or Relu()
    generator = torch.Generator().manual_seed(seed)
    W_enc, b_enc, b_dec = (torch.randn(*n, generator=generator) for n in ((d_in, F), (F,), (d_in,)))
    return SAE(W_enc, b_enc, W_enc.T / 10, b_dec, activation, activation.parameters(F))


def k_of(act: str, k: int = 4) -> dict[str, int]:
    """That k as an option, if the activation of this name has one."""
    return {"k": k} if "k" in ACTIVATIONS[act].__dataclass_fields__ else {}


def activation_of(act: str, k: int = 4) -> Activation:
    """An activation by its name, with that k if it has one."""
    return ACTIVATIONS[act](**k_of(act, k))


def sae_for(format: str, *names: str) -> SavedSAE:
    """An SAE, or else a transcoder, that a format can express, with the first of these activations, or but topk."""
    form = FORMATS[format]
    able = [kind.name for kind in form.activations or form.transcoders]
    act = next(name for name in able if (name in names if names else name != "topk"))
    return with_origin(random_sae(activation_of(act)), RESIDUAL if form.activations else MLP)


def with_origin(sae: SAE, entries: Mapping[str, Any]) -> SavedSAE:
    """An SAE with the origin of these entries of JSON."""
    return SavedSAE(sae, Origin.from_json(entries))


def load(path: Path, row_scale: float | None = None) -> SavedSAE:
    """The SAE in a folder or file, as a user gets it."""
    return formats.load(path, row_scale, fold=fold_in)


def change_json(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def make_run(
    home: Path,
    name: str,
    sae: SAE,
    data: str = "rows",
    split_seed: int = 0,
    fraction: float = 1.0,
    created: str = "2026-01-01",
    complete: bool = True,
    origin: dict[str, Any] = RESIDUAL,
    **more: Any,
) -> Path:
    """A run folder; `more`: further fields of run.json."""
    folder = home / "runs" / name
    folder.mkdir(parents=True)
    document = {
        "format_version": 1,
        "created": created,
        "complete": complete,
        "data": data,
        "training": {"split_seed": split_seed, "fraction": fraction},
        "solver": {"name": "sgd"},
        "activation": activation_to_json(sae.activation),
        "result": None,
    }
    (folder / "run.json").write_text(json.dumps(document | more))
    save_native(with_origin(sae, origin), folder)
    return folder


def make_transcoder(
    home: Path, name: str, sae: SAE, origin: dict[str, Any] = MLP
) -> tuple[np.ndarray, np.ndarray]:
    """A run from a store `x` to a store `y`, whose rows it returns."""
    x = make_store(home, "x", some_rows())
    y = make_store(home, "y", np.abs(some_rows(d_in=sae.d_out, seed=1)).cumsum(1))
    make_run(home, name, sae, data="x", origin=origin, target="y")
    return x, y


def weights(home: Path, run: str) -> dict[str, torch.Tensor]:
    return load_file(home / "runs" / run / "sae.safetensors")


def same_tensors(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether they have the same names and bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same(first: SAE, other: SAE) -> bool:
    """Whether two SAEs have the same activation, and weights bit for bit."""
    return first.activation == other.activation and same_tensors(first.tensors(), other.tensors())


def assert_same_weights(
    home: Path, first: str, second: str, rtol: float = 0, atol: float = 0
) -> None:
    """Two runs' weights are equal, bit for bit or within a tolerance."""
    torch.testing.assert_close(weights(home, second), weights(home, first), rtol=rtol, atol=atol)


def linear_map(width: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(8, width)).astype(np.float32)


def targets_of(x: np.ndarray, width: int = 5) -> np.ndarray:
    """A function of the rows with a bend, on another scale, with noise."""
    y = np.abs(x @ linear_map(width)) + 0.1 * np.random.default_rng(6).normal(size=(len(x), width))
    return (30 * y + 7).astype(np.float32)


@dataclass(frozen=True)
class Done:
    """What a command left: its exit status and its output."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        """The JSON document on stdout, which is all there may be, of a command that succeeded."""
        assert self.status == 0, self.err
        return json.loads(self.out)

    def succeeds(self) -> "Done":
        """Itself, whose status must be 0."""
        assert self.status == 0, self.err
        return self

    def fails(self, status: int, *said: str) -> "Done":
        """Itself, of that status, with no traceback on stderr but these words, wherever lines are broken."""
        told = " ".join(self.err.replace("\u2502", " ").split())
        assert self.status == status and "Traceback" not in self.err, self.err
        for words in said:
            assert words in self.err or words in told, self.err
        return self

    def fails_in_one_sentence(self, status: int, *said: str) -> "Done":
        """As `fails`, with nothing on stdout; the sentence is stderr's last line, unless Typer shows the usage."""
        if status == 1 or "Usage: " not in self.err:
            lines = self.err.splitlines()
            assert [line for line in lines if line.startswith("sae: ")] == lines[-1:], self.err
        assert self.out == ""
        return self.fails(status, *said)


@dataclass(frozen=True)
class CommandLine:
    """Runs `sae` in this process: `sae("train --data rows", "--name", name)`."""

    home: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, line: str, *words: str | Path) -> Done:
        argv = ["sae", "--home", str(self.home), *shlex.split(line), *map(str, words)]
        self.monkeypatch.setattr(sys, "argv", argv)
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        return Done(stop.value.code or 0, *self.capsys.readouterr())


def after_commands(home: Path, *lines: str) -> Path:
    """A home in which commands have been run: for fixtures that many tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saecli.show.pictures.draw_losses", lambda path, name, lines: path.touch())
        for line in lines:
            patch.setattr(sys, "argv", ["sae", "--home", str(home), *shlex.split(line)])
            with pytest.raises(SystemExit, match=r"^(0|None)?$"):
                main()
    return home


@cache
def docs_home() -> TemporaryDirectory:
    """What `trained_on_docs` copies, made once in a process."""
    folder = TemporaryDirectory()
    extract = f"extract --model {TINY_GEMMA2} --layer 1 --rows 2000 --dtype float32 --name docs"
    train = "train --act topk --k 4 --d-sae 64 --steps 20 --name first --solver sgd"
    after_commands(Path(folder.name), extract, train)
    return folder


def trained_on_docs(sae: CommandLine) -> torch.Tensor:
    """A store `docs` of the bundled model and a run `first` trained on it; the codes of all its rows, (2000, 64)."""
    shutil.copytree(docs_home().name, sae.home)
    store = saecli.open_store("docs", home=sae.home).split("all")
    x = torch.from_numpy(np.concatenate(list(store.sequential(500))))
    return saecli.load_sae("first", home=sae.home).encode(x)


def steerable(activation: Activation | None = None, d_in: int = 16) -> SAE:
    """An SAE whose decoder is no transpose of its encoder, of which about half of the latents fire."""
    sae = random_sae(activation, d_in)
    return sae.changed(W_dec=torch.randn(20, d_in, generator=torch.Generator().manual_seed(5)))


def crosscoder_of(places: list[dict[str, Any]], width: int = 16) -> SAE:
    """A crosscoder of hook points of one width, which it records."""
    cross = steerable(d_in=width * len(places)).with_widths((width,) * len(places))
    cross.metadata = places[0] | {"inputs": places}
    return cross


def nested_rows(rows: int, seed: int = 0) -> np.ndarray:
    """Rows of a few directions at a time, far from zero, the first directions the largest."""
    rng = np.random.default_rng(seed)
    directions = np.random.default_rng(9).normal(size=(20, D)) * np.linspace(2, 0.5, 20)[:, None]
    codes = rng.exponential(size=(rows, 20)) * (rng.random((rows, 20)) < 0.15)
    return (codes @ directions + 3).astype(np.float32)


def nested_sae(act: str) -> SAE:
    activation = activation_of(act)
    starts = activation.parameters(F)
    parameters = {name: torch.full_like(starts[name].double(), 0.3) for name in starts}
    shapes = ((D, F), (F,), (F, D), (D,))
    tensors = (normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
    return SAE(*tensors, activation, parameters, prefixes=PREFIXES)


def grid(*axes: Sequence[Any]) -> list[Any]:
    """Every combination, for `pytest.mark.parametrize`; slow where more than one axis is not at its last entry."""

    def is_quick(combination: tuple) -> bool:
        last = [value is axis[-1] for value, axis in zip(combination, axes, strict=True)]
        return last.count(False) <= 1

    return [
        pytest.param(*combination, marks=() if is_quick(combination) else pytest.mark.slow)
        for combination in product(*axes)
    ]
