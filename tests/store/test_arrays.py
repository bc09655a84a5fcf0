"""Every format gives the rows that its own library wrote, each way to flatten NumPy's; what is no array of rows is
refused by a sentence."""

import gzip
import math
import pickle
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from homes import CommandLine
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view
from sklearn.datasets import load_sample_images
from storing import collect, make_store

from saecli.base.errors import ConfigError, FormatError
from saecli.store import array_files
from saecli.store.array_files import ArraySource, ImportedArray, open_array
from saecli.store.arrays import Array
from saecli.store.options import ImportConfig
from saecli.store.reader import ActivationStore
from saecli.train.rows import ArrayRows

ROWS = np.random.default_rng(0).standard_normal((50, 3, 4)).astype(np.float32)
FLAT = ROWS.reshape(50, 12)
IDX_CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def write_safetensors(path, values):
    safetensors.numpy.save_file({"x": np.ascontiguousarray(values)}, path)


def write_torch(path, values):
    torch.save(torch.from_numpy(np.ascontiguousarray(values)), path)


def write_old_torch(path, values):
    torch.save({"x": torch.from_numpy(values.copy())}, path, _use_new_zipfile_serialization=False)


def write_hdf5(path, values):
    with h5py.File(path, "w") as file:
        file.create_group("group")["x"] = values


def write_idx(path, values):
    head = struct.pack(
        f">BBBB{values.ndim}I", 0, 0, IDX_CODES[values.dtype.str[1:]], values.ndim, *values.shape
    )
    content = head + values.astype(values.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


WRITERS = {
    "a.npy": np.save,
    "a.npz": np.savez_compressed,
    "a.safetensors": write_safetensors,
    "a.pt": write_torch,
    "old.pth": write_old_torch,
    "a.h5": write_hdf5,
    "a.hdf5": write_hdf5,
    "a-idx3-float": write_idx,
    "a.idx": write_idx,
    "a-idx3-ubyte.gz": write_idx,
}


def opened(path, key=None, **options):
    return open_array(str(path), ImportConfig(key=key, **options))


def values_of(source, start=0):
    blocks = [values for _, values in source.blocks(start)]
    return {name: np.concatenate([values[name] for values in blocks]) for name in blocks[0]}


def rows_of(source, start=0):
    return values_of(source, start)["rows"]


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "a.hdf5"])  # which is as a.h5
@pytest.mark.parametrize("dtype", ["<f4", "<f8", "|u1"])
def test_each_format_gives_the_rows_that_its_library_wrote(tmp_path, monkeypatch, name, dtype):
    monkeypatch.setattr(array_files, "BLOCK_BYTES", 7 * 12 * 4)
    values = (ROWS * 40 + 100).astype(dtype)
    WRITERS[name](tmp_path / name, values)
    source = opened(tmp_path / name, flatten="features")
    assert (source.rows, source.features, source.dtype) == (50, 12, "float32")
    expected = values.astype(np.float32).reshape(50, 12)
    np.testing.assert_array_equal(rows_of(source), expected)
    np.testing.assert_array_equal(rows_of(source, 14), expected[14:])
    assert [begin for begin, _ in source.blocks()] == list(range(0, 50, 7))
    positions = opened(tmp_path / name, flatten="positions")
    np.testing.assert_array_equal(rows_of(positions), values.astype(np.float32).reshape(150, 4))
    values = values_of(positions)
    np.testing.assert_array_equal(values["document"], np.repeat(np.arange(50), 3))
    np.testing.assert_array_equal(values["position"], np.tile(np.arange(3), 50))


def test_half_precision_is_kept(tmp_path):
    tensor = torch.from_numpy(ROWS[:, 0]).bfloat16()
    safetensors.torch.save_file({"x": tensor}, tmp_path / "a.safetensors")
    torch.save(tensor, tmp_path / "a.pt")
    stored = make_store(tmp_path / "s", ROWS[:, 0], "bfloat16")
    shard = next((tmp_path / "s" / "shards").iterdir())
    files = {tmp_path / "a.safetensors": None, tmp_path / "a.pt": None, shard: "activations"}
    for path, key in files.items():
        source = opened(path, key)
        assert source.dtype == "bfloat16"
        np.testing.assert_array_equal(rows_of(source), tensor.float().numpy())
    rows = collect(stored.split("all").sequential(50))
    np.testing.assert_array_equal(rows, tensor.float().numpy())
    np.save(tmp_path / "a.npy", ROWS[:, 0].astype(np.float16))
    assert opened(tmp_path / "a.npy").dtype == "float16"


@pytest.mark.parametrize("dtype", ["<i4", "<i8", "<u4", "|i1"])
def test_integers_are_no_rows(tmp_path, dtype):
    ids = np.random.default_rng(0).integers(0, 100, (50, 12)).astype(dtype)
    np.save(tmp_path / "a.npy", ids)
    with pytest.raises(FormatError, match="convert them to float32"):
        opened(tmp_path / "a.npy")
    for rows in (ids, np.zeros((5, 2), "V2")):
        with pytest.raises(ConfigError, match="rows must be floats, or bytes of images"):
            ArrayRows(rows)


def test_fortran_order_and_truth_values(tmp_path):
    np.save(tmp_path / "a.npy", np.asfortranarray(ROWS[:, 0]))
    np.testing.assert_array_equal(rows_of(opened(tmp_path / "a.npy")), ROWS[:, 0])
    np.save(tmp_path / "b.npy", ROWS[:, 0] > 0)
    np.testing.assert_array_equal(rows_of(opened(tmp_path / "b.npy")), ROWS[:, 0] > 0)


def test_patches_are_centred_and_of_separate_squares():
    source = open_array("patches")
    rows = rows_of(source)
    assert rows.shape == (4160, 256)
    np.testing.assert_array_equal(values_of(source)["document"], np.repeat(np.arange(520), 8))
    np.testing.assert_allclose(rows.mean(1), 0, atol=1e-4)
    norms = np.linalg.norm(rows, axis=1)
    assert 0 < 100 * norms.min() < norms.max()
    np.testing.assert_array_equal(rows_of(open_array("patches")), rows)
    # The first patch lies in the first square of the first photograph.
    square = load_sample_images().images[0].mean(-1)[:32, :32]
    windows = sliding_window_view(square, (16, 16)).reshape(-1, 256)
    centred = windows - windows.mean(1, keepdims=True)
    assert np.abs(centred - rows[0]).max(1).min() < 1e-3


def test_key_chooses_among_several_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", x=FLAT, y=-FLAT)
    values = {"x": torch.ones(2), "deep": {"y": torch.from_numpy(FLAT)}, "n": 3}
    torch.save(values, tmp_path / "a.pt")
    torch.save([values["x"], (values["deep"]["y"],)], tmp_path / "b.pt")
    np.testing.assert_array_equal(rows_of(opened(tmp_path / "a.npz", "y")), -FLAT)
    np.testing.assert_array_equal(rows_of(opened(tmp_path / "a.pt", "deep.y")), FLAT)
    np.testing.assert_array_equal(rows_of(opened(tmp_path / "b.pt", "1.0")), FLAT)


SHAPE = r"expected an array of shape \(rows, features\) or with more axes, got shape "
NUMBERS = "expected floats, or bytes of images, got "
REFUSED = {  # what a.npy or a.npz holds, key, and what is said
    "nothing": ({}, None, r"a\.npz: expected arrays, got none; name another"),
    "a vector": ({"x": ROWS[:, 0, 0]}, None, rf"a\.npy: {SHAPE}\(50,\)"),
    "a number": ({"x": np.float32(3)}, None, rf"a\.npy: {SHAPE}\(\)"),
    "no rows": ({"x": ROWS[:0]}, None, rf"{SHAPE}\(0, 3, 4\)"),
    "no width": ({"x": ROWS[:, :, :0]}, None, SHAPE),
    "complex": ({"x": ROWS.astype(complex)}, None, f"{NUMBERS}complex128"),
    "text": ({"x": np.array([["a"]])}, None, f"{NUMBERS}str32"),
    "dates": ({"x": np.zeros((3, 2), "M8[s]")}, None, NUMBERS),
    "records": ({"x": np.zeros((3, 2), "f4,i4")}, None, NUMBERS),
    "no key": ({"x": FLAT, "y": FLAT}, None, r"a\.npz has 2 arrays; .*--key .*\(x, y\)"),
    "another key": ({"x": FLAT, "y": FLAT}, "z", r"has no array z; .* one of its keys \(x, y\)"),
    "needless key": ({"x": FLAT}, "x", "holds one array, without a key; leave out --key"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_array_of_rows_is_refused(tmp_path, case):
    arrays, key, said = REFUSED[case]
    path = tmp_path / ("a.npy" if len(arrays) == 1 else "a.npz")
    if len(arrays) == 1:
        np.save(path, *arrays.values())
    else:
        np.savez(path, **arrays)
    with pytest.raises(FormatError, match=said):
        opened(path, key)


class Opened:
    def __reduce__(self):
        return (print, ("run",))


PICKLED = {
    "a.npy": lambda path: np.save(path, np.array([[Opened()]], object), allow_pickle=True),
    "a.npz": lambda path: np.savez(path, x=np.array([[Opened()]], object), allow_pickle=True),
    "zip.pt": lambda path: torch.save({"x": torch.ones(3, 2), "y": Opened()}, path),
    "old.pt": lambda path: torch.save({"y": Opened()}, path, _use_new_zipfile_serialization=False),
    "bare.pt": lambda path: path.write_bytes(pickle.dumps(Opened())),
}


@pytest.mark.parametrize("name", PICKLED)
def test_pickled_objects_are_refused_never_run_and_not_advised(tmp_path, capsys, name):
    PICKLED[name](tmp_path / name)
    with pytest.raises(FormatError, match=f"cannot (read|import) .*{name}") as caught:
        opened(tmp_path / name, "x" if name == "a.npz" else None)
    assert "weights_only" not in str(caught.value) and not capsys.readouterr().out


@pytest.mark.parametrize("name", WRITERS)
def test_files_of_another_format_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"<html>404, not found</html>" * 20)
    with pytest.raises(FormatError, match=f"cannot read .*{name}: .*check that the file is"):
        opened(tmp_path / name)


# Batch, position, width.
ACTS = np.random.default_rng(0).standard_normal((20, 7, 6)).astype(np.float32)
DEEP = ACTS.reshape(5, 4, 7, 6)


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.integers(1, 200), st.data())
def test_blocks_are_a_reshape_read_once_from_any_block_on(shape, most, data):
    values = np.arange(math.prod(shape)).reshape(shape)
    read = []
    rows = Array(shape, "float32", lambda part: read.append(values[part].size) or values[part])
    source = ArraySource([ImportedArray("x", tuple(shape), "float32", lambda: {"rows": rows})])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_files, "BLOCK_BYTES", 4 * most)
        blocks = [(begin, block["rows"]) for begin, block in source.blocks()]
        assert sum(read) == values.size
        expected = values.reshape(-1, shape[-1])
        np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), expected)
        assert all(block.size <= max(most, values[0].size) for _, block in blocks)
        starts = [begin for begin, _ in blocks]
        start = data.draw(st.sampled_from(starts))
        again = [begin for begin, _ in source.blocks(start)]
        assert again == starts[starts.index(start) :]
        np.testing.assert_array_equal(rows_of(source, start), expected[start:])


FLATTEN = "--flatten positions"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("acts", {}, f"{FLATTEN} gives 140 rows of 6 dimensions, .* features gives 20 rows of 42;"),
        ("deep", {}, f"{FLATTEN} --index : gives 140 rows of 6 .* features gives 5 rows of 168;"),
        ("one", {}, f"{FLATTEN} gives 1 row of 6 dimensions, .* features gives 1 row of 6;"),
        ("flat", {"flatten": "features"}, "--flatten does nothing with"),
        ("digits", {"flatten": "features"}, "leave out --key, --flatten"),
        ("digits", {"key": "x"}, "leave out --key"),
        ("a.csv", {}, r"expected a name that ends in \.npy, .*got a\.csv"),
        ("missing.npy", {}, r"missing\.npy: expected files of arrays, got none"),
        ("folder.npy", {}, r"folder\.npy: expected files of arrays, got none"),
    ],
)
def test_rows_that_need_another_option_or_file_are_refused(tmp_path, name, options, said):
    for file, values in (("acts", ACTS), ("deep", DEEP), ("one", ACTS[:1, :1]), ("flat", ACTS[0])):
        np.save(tmp_path / f"{file}.npy", values)
    (tmp_path / "a.csv").touch()
    (tmp_path / "folder.npy").mkdir()
    file = name if name == "digits" else tmp_path / (name if "." in name else f"{name}.npy")
    with pytest.raises(FormatError, match=said):
        opened(file, **options)


def test_imported_positions_hold_out_whole_sequences(sae: CommandLine, tmp_path: Path):
    np.save(tmp_path / "acts.npy", ACTS)
    done = sae("import", tmp_path / "acts.npy", "--flatten", "positions", "--json")
    assert done.json["rows"] == 140
    store = ActivationStore.open(sae.home / "activations" / "acts")
    np.testing.assert_array_equal(collect(store.split("all").sequential(64)), ACTS.reshape(140, 6))
    test, train = store.split("test"), store.split("train")
    held_out = np.concatenate([*test.column("document", 100)])
    assert not set(held_out) & set(np.concatenate([*train.column("document", 100)]))
    assert 0 < len(held_out) < 140
    positions = np.concatenate([*test.column("position", 100)])
    np.testing.assert_array_equal(positions, np.tile(np.arange(7), len(set(held_out))))
