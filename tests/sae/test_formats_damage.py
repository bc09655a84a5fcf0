"""Damaged files of SAEs, in every format, and weights that do not fit each other: a FormatError of one sentence."""

import json
import random
import resource
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest
import torch
from homes import D, random_sae, sae_for
from launching import captured
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from storing import damaged

from saecli.base.errors import FormatError
from saecli.sae.activations import BatchTopK
from saecli.sae.formats import WRITABLE, SavedSAE, load, save

TIMES = 120  # that each file is damaged
HUGE = 10**13


def saved(name: str, folder: Path) -> Path:
    save(sae_for(name), name, folder)
    return folder


def old_torch(folder: Path) -> None:
    """As torch wrote it before 1.6."""
    path = saved("dictionary-learning", folder) / "ae.pt"
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)


WRITE: dict[str, Callable[[Path], object]] = {name: partial(saved, name) for name in WRITABLE} | {
    "old torch": old_torch,
    "gemma-scope": published.gemma_scope,
    "gemma-scope-2": published.gemma_scope_2,
    "crosscoder": published.gemma_scope_2_crosscoder,
    "checkpoint": partial(published.saelens_checkpoint, factor=0.4),
    "llama-scope": published.llama_scope,
    "llama-scope-r1": partial(published.llama_scope, r1=True),
    "qwen-scope": published.qwen_scope,
    "goodfire": lambda folder: published.goodfire(folder / "Llama-SAE-l9.pt"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITE)
def test_damage_is_one_sentence_that_names_the_file_or_does_not_matter(tmp_path: Path, name: str):
    folder = tmp_path / "sae-k4"  # where Qwen-Scope has k
    WRITE[name](folder)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content, chance, refused = path.read_bytes(), random.Random(path.name), 0
        for _ in range(TIMES):
            path.write_bytes(damaged(content, chance))
            try:
                load(folder)
            except FormatError as error:
                refused += 1
                assert "\n" not in str(error) and str(folder) in str(error)
        path.write_bytes(content)
        assert refused > TIMES / 20
    load(folder)


def native(folder: Path, **entries: object) -> None:
    """A file of this tool's own, of 20 latents and 8 dimensions, with other entries in its header."""
    save(SavedSAE(random_sae(BatchTopK(k=4))), "native", folder)
    path = folder / "sae.safetensors"
    with safe_open(path, framework="pt") as opened:
        header = json.loads(opened.metadata()["saecli"])
    save_file(load_file(path), path, {"saecli": json.dumps(header | entries)})


@pytest.mark.parametrize(
    "entries",
    [
        *(
            {"prefixes": ends}
            for ends in ([2, 5], [5, 2, 20], [-1, 20], [3, 99], [0, 20], [5, 5, 20])
        ),
        *({"prefixes": ends} for ends in ([2.5, 20], ["5", 20], 20, [True, 20])),
        *({"widths": widths} for widths in ([1, 2], [9, 9], [-8, 16], [0, 8], [8.0])),
        *({"origin": {"layer": layer}} for layer in (-1, 1.5, "3", True)),
        {"widths": [4, 4], "origin": {"inputs": [{"site": 5}, {"site": "resid_post"}]}},
        {"widths": [4, 4], "origin": {"inputs": [{"layer": -2, "site": "mlp_out"}, {}]}},
        *({"scale": scale} for scale in ([1] * 8, [1] * 15 + [-1], [1] * 15 + [np.nan], {}, ["a"])),
        {"origin": {"fraction": 0}},
        {"origin": {"split_seed": -1}},
        *({"activation": {"name": "batchtopk", "k": k}} for k in (0, -1, 21, 2.5, None, True, "4")),
        {"activation": {"name": "batchtopk", "k": 4, "extra": 1}},
        {"activation": {"name": "swish"}},
        {"activation": []},
        {"transcodes": "yes"},
        {"format_version": 99},
    ],
)
def test_entries_of_a_header_that_do_not_fit_are_refused(tmp_path: Path, entries: dict) -> None:
    native(tmp_path / "sae", **entries)
    with pytest.raises(FormatError, match=r"/sae\b.*: .*(expected|must|at most)"):
        load(tmp_path / "sae")


def test_widths_that_fit_are_kept(tmp_path: Path) -> None:  # prefixes: see test_prefixes.py
    native(tmp_path, widths=[1, 7])
    assert load(tmp_path).sae.widths == (1, 7)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            ("group_sizes", sizes)
            for sizes in ([5, 5], [20, -5, 5], [0, 20], [], [5.5, 14.5], [[20]])
        ),
        *(("k", k) for k in (0, 21, 3.7, [4, 4], -1)),
        *(("threshold", threshold) for threshold in (np.nan, np.inf, [0.5] * 20, 1)),
    ],
)
def test_tensors_of_settings_that_do_not_fit_are_refused(tmp_path: Path, key: str, value: object):
    published.dictionary_learning(tmp_path, "MatryoshkaBatchTopKSAE")
    rename(tmp_path, key, torch.tensor(value))
    with pytest.raises(FormatError, match=str(tmp_path)):
        load(tmp_path)


NORMS = ({"in": norm, "out": 1.0} for norm in (0.0, -1.0, np.nan, np.inf, 1e-320))


@pytest.mark.parametrize(
    "hyperparams",
    [
        *({"jump_relu_threshold": threshold} for threshold in (-0.5, np.nan)),
        *({"dataset_average_activation_norm": norms} for norms in NORMS),
    ],
)
def test_scales_that_make_no_finite_weights_are_refused(tmp_path: Path, hyperparams: dict) -> None:
    published.llama_scope(tmp_path, **hyperparams)
    with pytest.raises(FormatError, match=str(tmp_path)):
        load(tmp_path)


def test_gates_that_overflow_are_refused(tmp_path: Path) -> None:
    published.saelens(tmp_path, "gated", changed={"r_mag": np.full(20, 1000.0)})
    with pytest.raises(FormatError, match="expected finite numbers"):
        load(tmp_path)


def safetensors(dtype: str) -> bytes:
    header = json.dumps({"W_enc": {"dtype": dtype, "shape": [4], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


def without_end() -> dict[str, torch.Tensor]:
    single = torch.ones(1, 1)
    return {
        "encoder.weight": single.expand(HUGE, D),
        "encoder.bias": single[0].expand(HUGE),
        "decoder.weight": single.expand(D, HUGE),
        "bias": single[0].expand(D),
    }


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (without_end, "TB of free memory, got .*; end other programs"),
        (lambda: torch.ones(3), "expected a state_dict, tensors by name, got Tensor"),
    ],
)
def test_tensors_that_nothing_can_be_computed_with_are_refused(tmp_path, tensors, said):
    folder = saved("dictionary-learning", tmp_path / "sae")
    (folder / "config.json").write_text('{"trainer": {"dict_class": "AutoEncoder"}}')
    torch.save(tensors(), folder / "ae.pt")
    with pytest.raises(FormatError, match=rf"ae\.pt: .*{said}"):
        load(folder)


@pytest.mark.parametrize("dtype", ["U16", "C64", "I128", "U3", np.int64, object])
def test_numbers_of_other_types_are_refused(tmp_path: Path, dtype: Any) -> None:
    if dtype in ("U16", "C64", "I128"):
        (tmp_path / "sae.safetensors").write_bytes(safetensors(dtype))
    else:
        np.savez(tmp_path / "params.npz", W_enc=np.zeros((2, 3), dtype))
    with pytest.raises(FormatError, match=str(tmp_path)):
        load(tmp_path)


@pytest.mark.slow
def test_a_disk_that_refuses_leaves_no_folder_behind(tmp_path: Path) -> None:
    script = f"""
import resource, sys, torch
from pathlib import Path
from saecli.sae.activations import Relu, ReluTopK
from saecli.base.errors import FormatError
from saecli.sae.activations import BatchTopK
from saecli.sae.formats import FORMATS, WRITABLE, SavedSAE, save
from saecli.sae.dictionary import SAE
from saecli.store.origin import HookPoint, Origin
sae = SAE(torch.ones(64, 256), torch.ones(256), torch.ones(256, 64), torch.ones(64), ReluTopK(k=2))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, {resource.RLIM_INFINITY}))
MLP = Origin(read=(HookPoint(3, "mlp_in"),), written=HookPoint(3, "mlp_out"))
for name in WRITABLE:
    form = FORMATS[name]
    activation = ReluTopK(k=2) if ReluTopK in form.activations else Relu()
    try:
        save(SavedSAE(sae.changed(activation), Origin() if form.activations else MLP), name, Path(sys.argv[1]) / name)
    except (FormatError, OSError) as error:
        print(type(error).__name__)
"""
    done = captured([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert len(done.stdout.split()) == len(WRITABLE)
    assert set(done.stdout.split()) <= {"FormatError", "OSError"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", [name for name in WRITABLE if name != "circuit-tracer"])
@pytest.mark.parametrize(
    ("name", "shape"), [("b_dec", (5,)), ("b_enc", (1,)), ("W_dec", (20, 3)), ("W_enc", (0, 20))]
)
def test_weights_that_do_not_fit_each_other_are_refused_by_name(tmp_path, format, name, shape):
    save(sae_for(format, "relu-topk", "jumprelu"), format, tmp_path / "sae")
    encoder = {"W_enc": "encoder.weight", "b_enc": "encoder.bias"}
    theirs = {"sparsify": encoder, "dictionary-learning": encoder | {"W_dec": "decoder.weight"}}
    rename(tmp_path / "sae", theirs.get(format, {}).get(name, name), torch.zeros(shape))
    with pytest.raises(FormatError, match=f"expected {name} of shape"):
        load(tmp_path / "sae")


def rename(folder: Path, name: str, tensor: torch.Tensor) -> None:
    """Put another tensor in the place of one, in whichever file holds it."""
    (file,) = (path for path in folder.iterdir() if path.suffix not in (".json", ".yaml"))
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        save_file(load_file(file) | {name: tensor}, file, metadata)
    else:
        torch.save(torch.load(file) | {name: tensor}, file)
