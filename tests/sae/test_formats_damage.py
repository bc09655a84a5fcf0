"""Damaged files of SAEs, in every format: one of the tool's own errors, in one sentence, or no matter.

No oracle but the sentence: what such files raise in the libraries that read them is in `saecli.store.arrays`.
"""

import json
import random
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import published
import pytest
import torch
from damage import damaged
from homes import CommandLine, D, F, make_run, make_store, random_sae, sae_for, some_rows

from saecli.base.errors import FormatError
from saecli.sae.formats import WRITABLE, load, save
from saecli.sae.formats import dictionary_learning as dictionary

TIMES = 120  # that each file is damaged
HUGE = 10**13


def saved(name: str, folder: Path) -> Path:
    save(sae_for(name), name, folder)
    return folder


def old_torch(folder: Path) -> Path:
    """As torch wrote it before 1.6."""
    path = saved("dictionary-learning", folder) / dictionary.TENSORS
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    return folder


def crosscoder(folder: Path) -> Path:
    return published.gemma_scope_2_crosscoder(folder).path


def llama_scope(folder: Path) -> Path:
    return published.llama_scope(folder, moved=True).path


def qwen_scope(folder: Path) -> Path:
    return published.qwen_scope(folder, k=4).path.parent


@pytest.mark.slow
@pytest.mark.parametrize("write", [*WRITABLE, old_torch, crosscoder, llama_scope, qwen_scope],
                         ids=lambda write: getattr(write, "__name__", write))
def test_damage_is_told_in_one_sentence_that_names_the_place_or_does_not_matter(
        tmp_path: Path, write: str | Callable[[Path], Path]) -> None:
    folder = write(tmp_path / "sae") if callable(write) else saved(write, tmp_path / "sae")
    for path in sorted(folder.iterdir()):
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


def safetensors(dtype: str) -> bytes:
    header = json.dumps({"W_enc": {"dtype": dtype, "shape": [4], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


def without_device() -> dict[str, torch.Tensor]:
    return {"encoder.weight": torch.ones(F, D, device="meta"), "encoder.bias": torch.ones(F),
            "decoder.weight": torch.ones(D, F), "bias": torch.ones(D)}


def without_end() -> dict[str, torch.Tensor]:
    one = torch.ones(1, 1)
    return {"encoder.weight": one.expand(HUGE, D), "encoder.bias": one[0].expand(HUGE),
            "decoder.weight": one.expand(D, HUGE), "bias": one[0].expand(D)}


@pytest.mark.parametrize(("tensors", "said"), [
    (without_device, "expected numbers in 'encoder.weight', got float32, torch.strided, on meta"),
    (without_end, "TB of free memory, which it takes at once, got .*; end other programs"),
    (lambda: {"bias": torch.ones(3).to_sparse()}, "got float32, torch.sparse_coo, on cpu"),
    (lambda: {"bias": torch.ones(3).to(torch.float8_e4m3fn)}, "got float8_e4m3fn"),
    (lambda: torch.ones(3), "expected a state_dict, tensors by name, got Tensor"),
])
def test_tensors_that_nothing_can_be_computed_with_are_refused(tmp_path: Path, tensors: Callable, said: str) -> None:
    folder = saved("dictionary-learning", tmp_path / "sae")
    (folder / dictionary.CONFIG).write_text('{"trainer": {"dict_class": "AutoEncoder"}}')
    torch.save(tensors(), folder / dictionary.TENSORS)
    with pytest.raises(FormatError, match=rf"{folder / dictionary.TENSORS}: .*{said}"):
        load(folder)


@pytest.mark.parametrize("dtype", ["U16", "F4", "F6_E2M3", "F8_E4M3", "F8_E8M0", "C64", "I128"])
def test_types_that_torch_may_not_know_are_refused(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "sae.safetensors").write_bytes(safetensors(dtype))
    with pytest.raises(FormatError, match=r"sae\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [np.longdouble, "U3", "M8[s]", np.complex64, np.int64, object])
def test_arrays_of_other_types_are_refused(tmp_path: Path, dtype: object) -> None:
    np.savez(tmp_path / "params.npz", W_enc=np.zeros((2, 3), dtype))
    with pytest.raises(FormatError, match=r"params\.npz: expected (floating-point )?numbers"):
        load(tmp_path)


def test_a_damaged_run_is_one_line_of_the_command_line(sae: CommandLine) -> None:
    make_store(sae.home, "rows", some_rows())
    path = make_run(sae.home, "run", random_sae()) / "sae.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    done = sae("eval", "run")
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert done.err.startswith(f"sae: cannot read {path}: expected numbers in its name's format, got something else; ")


@pytest.mark.slow
def test_a_disk_that_refuses_leaves_no_folder_behind(tmp_path: Path) -> None:
    script = f"""
import resource, sys, torch
from pathlib import Path
from saecli.sae.activations import Relu, ReluTopK
from saecli.base.errors import FormatError
from saecli.sae.formats import FORMATS, WRITABLE, SavedSAE, save
from saecli.sae.dictionary import SAE
sae = SAE(torch.ones(64, 256), torch.ones(256), torch.ones(256, 64), torch.ones(64), ReluTopK(k=2))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, {resource.RLIM_INFINITY}))
places = {{"layer": 3, "site": "mlp_in", "target_layer": 3, "target_site": "mlp_out"}}
for name in WRITABLE:
    form = FORMATS[name]
    activation = ReluTopK(k=2) if ReluTopK in form.activations else Relu()
    try:
        save(SavedSAE(sae.changed(activation), {{}} if form.activations else places), name, Path(sys.argv[1]) / name)
    except (FormatError, OSError) as error:
        print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == len(WRITABLE)
    assert set(done.stdout.split()) <= {"FormatError", "OSError"}
    assert list(tmp_path.iterdir()) == []
