"""Files made to do harm, or damaged: each is refused by one sentence, before it crashes, hangs or fills anything.

No oracle but the sentence: what these files made of the process before is in their names.
"""

import gzip
import io
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from homes import CommandLine
from safetensors.numpy import save
from storing import damaged

from saecli.base.errors import FormatError
from saecli.store.array_files import open_array
from saecli.store.options import ImportConfig

ROWS = np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32)
OTHERS = np.arange(20)
HUGE = 10**13


def read(path: Path, key: str | None = None) -> None:
    for _ in open_array(str(path), ImportConfig(key=key)).blocks():
        pass


def hdf5(fill: Callable[[h5py.File], object]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with h5py.File(path, "w") as file:
            fill(file)

    return make


def dataset(shape: tuple[int, int] = (20, 6), **options: object) -> Callable[[Path], None]:
    return hdf5(lambda file: file.create_dataset("x", shape, "f4", **options))


def link(target: object) -> Callable[[Path], None]:
    return hdf5(lambda file: file.__setitem__("x", target))


def virtual(source: str, length: int | None) -> Callable[[Path], None]:
    def fill(file: h5py.File) -> None:
        layout = h5py.VirtualLayout((20, 6), "f4", maxshape=(length, 6))
        other = h5py.VirtualSource(source, "x", (20, 6), maxshape=(length, 6))
        part = slice(0, length or h5py.h5s.UNLIMITED)
        layout[part] = other[part]
        file.create_virtual_dataset("x", layout)

    return hdf5(fill)


ELSEWHERE = "has its numbers elsewhere; write them into a dataset of this file"
NOT_IN_FULL = "was not written in full"
HDF5 = {
    "itself": (virtual("a.h5", 20), ELSEWHERE),
    "a pipe": (virtual("pipe", 20), ELSEWHERE),
    "a pipe for its shape": (virtual("pipe", None), ELSEWHERE),
    "external": (dataset(external=[("pipe", 0, 480)]), ELSEWHERE),
    "never written": (dataset((10**9, 10**3)), NOT_IN_FULL),
    "partly written": (
        hdf5(lambda file: file.create_dataset("x", (20, 6), "f4", chunks=(5, 6)).__setitem__(3, 1)),
        NOT_IN_FULL,
    ),
    "unknown filter": (
        dataset(chunks=(5, 6), compression=32001, allow_unknown_filter=True),
        "compressed by an unknown filter; use gzip",
    ),
    "link to a file": (link(h5py.ExternalLink("pipe", "/y")), "expected arrays, got none"),
    "link to itself": (link(h5py.SoftLink("/x")), "expected arrays, got none"),
}


def test_links_of_hdf5_are_no_arrays_to_choose_from(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["deep/x"] = ROWS
        file["deep/other"] = h5py.ExternalLink("pipe", "/y")
        file["again"] = h5py.SoftLink("/deep/x")
    read(tmp_path / "a.h5")
    with pytest.raises(FormatError, match=r"one of its keys \(deep/x\)"):
        read(tmp_path / "a.h5", "again")


def npy(values: np.ndarray = ROWS, **claimed: object) -> bytes:
    """A file of NumPy's, with something else claimed in its header."""
    content = io.BytesIO()
    header = {**np.lib.format.header_data_from_array_1_0(values), **claimed}
    np.lib.format.write_array_header_1_0(content, header)
    return content.getvalue() + values.tobytes()


def archive(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as file:
        for name, member in members:
            file.writestr(name, member)
    return content.getvalue()


def torch_file(values: object, **options: bool) -> bytes:
    content = io.BytesIO()
    torch.save(values, content, **options)
    return content.getvalue()


FILES = {
    "negative shape.npy": lambda: npy(shape=(-20, 6)),
    "shape of no number.npy": lambda: npy(shape=(20, True)),
    "huge shape.npy": lambda: npy(shape=(2**70, 6)),
    "no header.npy": lambda: b"\x93NUMPY\x01\x00\x04\x00'''\n",
    "no array.npz": lambda: archive(("x.npy", b"text")),
    "flipped.npz": lambda: archive(("x.npy", npy())).replace(ROWS[9].tobytes(), ROWS[8].tobytes()),
    "claimed shape.npz": lambda: archive(("x.npy", npy(shape=(HUGE, 6)))),
    "claimed-idx3-ubyte.gz": lambda: gzip.compress(
        struct.pack(">4B3I", 0, 0, 8, 3, 2**32 - 1, 2**20, 1)
    ),
    "sizes.idx": lambda: struct.pack(">4BI", 0, 0, 8, 200, 7),
    "one wide row.pt": lambda: torch_file(torch.ones(1, 1).expand(2, HUGE)),
    "of no device.pt": lambda: torch_file(torch.ones(3, 4, device="meta")),
    "claimed.safetensors": lambda: save({"x": ROWS}).replace(b"[20,6]", b"[99,6]"),
    "old.pth": lambda: torch_file(torch.ones(3, 4), _use_new_zipfile_serialization=False)[:50],
    "none.safetensors": lambda: struct.pack("<Q", 2**63) + b"{}",
}
SAID = {
    "claimed-idx3-ubyte.gz": "expected 4504 TB of free memory",
    "claimed shape.npz": "expected memory for it, got none",
    "one wide row.pt": "expected 40 TB of free memory",
}
NOT_THIS = "check that the file is whole and of this format"  # said of the others
CASES = [
    *(
        (name, lambda path, make=make: path.write_bytes(make()), SAID.get(name, NOT_THIS))
        for name, make in FILES.items()
    ),
    *((f"{name}.h5", make, said) for name, (make, said) in HDF5.items()),
]


@pytest.mark.parametrize(("name", "write", "said"), CASES, ids=[*FILES, *HDF5])
def test_files_that_lie_or_lead_elsewhere_are_refused(tmp_path, monkeypatch, name, write, said):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    file = Path("a.h5" if name.endswith("h5") else name)  # some of HDF5's refer to themselves
    write(file)
    with pytest.raises(FormatError, match=said) as refused:
        read(file)
    assert str(file) in str(refused.value)


def test_rows_that_no_disk_holds_are_refused(sae: CommandLine, tmp_path: Path):
    torch.save(torch.ones(1, 1).expand(HUGE, 100), tmp_path / "a.pt")
    sae("import", tmp_path / "a.pt").fails(1, "4000 TB of free disk for 10,000,000,000,000 rows")


def idx(values: np.ndarray) -> bytes:
    return struct.pack(">4B2I", 0, 0, 0x0D, 2, *values.shape) + values.astype(">f4").tobytes()


def both() -> dict[str, torch.Tensor]:
    return {"x": torch.from_numpy(ROWS), "y": torch.from_numpy(OTHERS)}


WHOLE = {  # a file, and how often it is damaged
    "a.npy": (npy(), 300),
    "a.npz": (archive(("x.npy", npy()), ("y.npy", npy(OTHERS)), method=zipfile.ZIP_DEFLATED), 150),
    "a.pt": (torch_file(both()), 100),
    "old.pt": (torch_file(both(), _use_new_zipfile_serialization=False), 150),
    "a.safetensors": (save({"x": ROWS, "y": OTHERS}), 300),
    "a.idx": (idx(ROWS), 300),
    "a.idx.gz": (gzip.compress(idx(ROWS)), 300),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_damage_gives_one_sentence_or_does_not_matter(tmp_path, name):
    content, times = WHOLE[name]
    chance, refused = random.Random(0), 0
    for _ in range(times):
        (tmp_path / name).write_bytes(damaged(content, chance))
        key = "x" if "idx" not in name and "npy" not in name else None
        try:
            read(tmp_path / name, key)
        except FormatError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > times / 10
