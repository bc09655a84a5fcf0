"""Rows of many files are those of their arrays one after another, with documents, token ids and masks; rows that may be
no activations are warned of. Oracle: NumPy's own concatenation, indexing and boolean masks."""

import json
import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pyarrow
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from storing import collect

import saecli
from saecli.base import machine
from saecli.base.errors import ConfigError, FormatError, StoreError
from saecli.sae.formats.common import read_npz
from saecli.store import array_files
from saecli.store.array_files import open_array
from saecli.store.options import ImportConfig
from saecli.store.reader import ActivationStore

COUNTS = [7, 30, 1, 12, 9, 25, 4, 18, 6, 11, 3, 14]
PARTS = [np.random.default_rng(n).standard_normal((n, 6)).astype(np.float32) for n in COUNTS]
TOGETHER = np.concatenate(PARTS)


def values_of(file, start=0, **options):
    source = open_array(file, ImportConfig(**options))
    blocks = [values for _, values in source.blocks(start)]
    return {name: np.concatenate([values[name] for values in blocks]) for name in blocks[0]}


def rows_of(store: ActivationStore) -> np.ndarray:
    return collect(store.split("all").sequential(1000))


def write_numpy(folder: Path) -> str:
    for number, rows in enumerate(PARTS):
        np.save(folder / f"{number}.npy", rows)
    (folder / "notes.txt").write_text("no array")
    return str(folder)


def write_pattern(folder: Path) -> str:
    return write_numpy(folder) + "/*.npy"


def write_list(folder: Path) -> str:
    torch.save([torch.from_numpy(rows) for rows in PARTS], folder / "a.pt")
    return str(folder / "a.pt")


def write_index(folder: Path) -> str:
    tensors = {f"x.{number}": torch.from_numpy(rows) for number, rows in enumerate(PARTS)}
    files = {name: f"m-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(tensors)}
    for file in set(files.values()):
        own = {name: tensors[name] for name in tensors if files[name] == file}
        safetensors.torch.save_file(own, folder / file)
    document = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "m.safetensors.index.json").write_text(json.dumps(document))
    return str(folder)


def write_lists(folder: Path) -> str:
    lists = pyarrow.array(TOGETHER.tolist(), pyarrow.list_(pyarrow.float32()))
    table = pyarrow.table({"x": lists, "text": ["a"] * len(lists), "id": range(len(lists))})
    parquet.write_table(table, folder / "a.parquet", row_group_size=33)
    return str(folder / "a.parquet")


def write_fixed_lists(folder: Path) -> str:
    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(TOGETHER.ravel()), 6)
    parquet.write_table(pyarrow.table({"x": lists}), folder / "a.parquet", row_group_size=50)
    return str(folder / "a.parquet")


def write_raw(folder: Path) -> str:
    TOGETHER.tofile(folder / "a.bin")
    return str(folder / "a.bin")


MADE = {
    "a folder": (write_numpy, {}),
    "a pattern": (write_pattern, {}),
    "a list": (write_list, {}),
    "an index": (write_index, {"key": "*"}),
    "lists": (write_lists, {}),
    "fixed lists": (write_fixed_lists, {}),
    "raw": (write_raw, {"shape": "-1,6", "dtype": "float32"}),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("block", [40, 10_000])
def test_parts_follow_each_other_in_the_order_of_their_numbers(tmp_path, monkeypatch, kind, block):
    monkeypatch.setattr(array_files, "BLOCK_BYTES", block * 6 * 4)
    write, options = MADE[kind]
    file = write(tmp_path)
    np.testing.assert_array_equal(values_of(file, **options)["rows"], TOGETHER)
    starts = [start for start, _ in open_array(file, ImportConfig(**options)).blocks()]
    for start in starts:  # where an interrupted import goes on
        again = [begin for begin, _ in open_array(file, ImportConfig(**options)).blocks(start)]
        assert again == starts[starts.index(start) :]
        np.testing.assert_array_equal(values_of(file, start, **options)["rows"], TOGETHER[start:])


@pytest.mark.parametrize(
    ("kind", "by_document"),
    [("a folder", True), ("a list", True), ("an index", False), ("lists", False)],
)
def test_files_are_documents_unless_they_are_shards_or_few(tmp_path, kind, by_document):
    write, options = MADE[kind]
    values = values_of(write(tmp_path), **options)
    assert ("document" in values) == by_document
    if by_document:
        np.testing.assert_array_equal(values["document"], np.repeat(np.arange(12), COUNTS))
        np.testing.assert_array_equal(values["position"], np.concatenate([*map(np.arange, COUNTS)]))


def test_few_files_and_shards_by_name_are_split_by_row(tmp_path):
    for number, rows in enumerate(PARTS):
        np.save(tmp_path / f"x-{number}-of-12.npy", rows)
    assert values_of(str(tmp_path)).keys() == {"rows"}
    few = [tmp_path / f"x-{number}-of-12.npy" for number in (3, 1)]
    values = values_of(few)
    assert values.keys() == {"rows"}
    np.testing.assert_array_equal(values["rows"], np.concatenate([PARTS[3], PARTS[1]]))


def write_requests(folder: Path, layers: int = 3) -> np.ndarray:
    """A file for each request, as vLLM's connector for hidden states writes them; all (tokens, layers, d)."""
    requests = [torch.randn(count, layers, 6).bfloat16() for count in COUNTS[:5]]
    for number, states in enumerate(requests):
        tensors = {"hidden_states": states, "token_ids": torch.arange(len(states)) + 100 * number}
        safetensors.torch.save_file(tensors, folder / f"{number}-0a1b.safetensors")
    return torch.cat(requests).float().numpy()


def test_requests_of_vllm_are_documents_with_their_token_ids(tmp_path):
    states = write_requests(tmp_path)
    for options, rows in (
        ({"index": ":,1"}, states[:, 1]),
        ({"index": ":,-1"}, states[:, -1]),
        ({"flatten": "features"}, states.reshape(len(states), -1)),
    ):
        values = values_of(tmp_path, **options)
        np.testing.assert_array_equal(values["rows"], rows)
        np.testing.assert_array_equal(values["document"], np.repeat(np.arange(5), COUNTS[:5]))
        tokens = [np.arange(count) + 100 * number for number, count in enumerate(COUNTS[:5])]
        np.testing.assert_array_equal(values["token_id"], np.concatenate(tokens))
    with pytest.raises(
        FormatError,
        match=r"got axis 0 of 7, axis 1 of 3, and 6 dimensions: --flatten features .*':,0'",
    ):
        open_array(tmp_path)
    alone = write_requests(tmp_path, layers=1)
    store = saecli.import_array(tmp_path, "v", home=tmp_path / "home", index=":,0")
    assert (store.dtype, store.meta.columns) == ("bfloat16", ("document", "position", "token_id"))
    np.testing.assert_array_equal(values_of(tmp_path)["rows"], alone[:, 0])
    np.testing.assert_array_equal(rows_of(store), alone[:, 0])


PADDED = np.random.default_rng(0).standard_normal((40, 9, 6)).astype(np.float32)
MASK = np.arange(9) < np.random.default_rng(0).integers(2, 9, 40)[:, None]
IDS = np.arange(360).reshape(40, 9)


@pytest.mark.parametrize("dtype", [bool, np.int64, np.float32])
def test_a_mask_leaves_out_its_zeros(tmp_path, dtype):
    path, home = tmp_path / "a.npz", tmp_path / "home"
    np.savez(path, hidden_states=PADDED, attention_mask=MASK.astype(dtype), input_ids=IDS)
    options = {"key": "hidden_states", "flatten": "positions", "shard_rows": 50, "home": home}
    store = saecli.import_array(path, mask="attention_mask", **options)
    np.testing.assert_array_equal(rows_of(store), PADDED[MASK])
    assert store.meta.dropped == {"masked": (~MASK).sum()}
    rows = store.split("all")
    for name, expected in (
        ("token_id", IDS),
        ("document", np.arange(40)[:, None] + 0 * IDS),
        ("position", np.arange(9) + 0 * IDS),
    ):
        np.testing.assert_array_equal(np.concatenate([*rows.column(name, 100)]), expected[MASK])
    with pytest.warns(UserWarning, match="add --mask attention_mask"):
        saecli.import_array(path, "all", **options)


def test_a_mask_of_the_positions_is_not_taken_for_one_of_layers(tmp_path):
    deep, mask = DEEP[:4, :, :4], MASK[:4, :4]  # 4 layers of 4 positions
    np.savez(tmp_path / "a.npz", x=deep, mask=mask)
    for index, expected in ((":,2", deep[:, 2]), (":,:,2", deep[:, :, 2])):
        values = values_of(tmp_path / "a.npz", key="x", index=index, mask="mask")
        np.testing.assert_array_equal(values["rows"].reshape(4, 4, 6), expected)
        np.testing.assert_array_equal(values["mask"].reshape(4, 4) > 0, mask)


@pytest.mark.parametrize("shape", [(40, 9, 1), (40, 1, 1, 9), (360,)])
@pytest.mark.parametrize("rows", [(40, 9, 6), (360, 6)])
def test_masks_of_other_axes_are_of_the_same_positions(tmp_path, shape, rows):
    path, home = tmp_path / "a.npz", tmp_path / "home"
    np.savez(path, x=PADDED.reshape(rows), mask=MASK.reshape(shape))
    options = {"key": "x", "home": home} | ({"flatten": "positions"} if len(rows) > 2 else {})
    with pytest.warns(UserWarning, match="add --mask mask"):
        saecli.import_array(path, "all", **options)
    store = saecli.import_array(path, mask="mask", shard_rows=50, **options)
    np.testing.assert_array_equal(rows_of(store), PADDED[MASK])


def test_masks_of_batches_of_several_lengths_in_a_list(tmp_path):
    lengths = [9, 4, 7]
    batches = [
        {"x": torch.from_numpy(PADDED[:8, :length]), "mask": torch.from_numpy(MASK[:8, :length])}
        for length in lengths
    ]
    torch.save(batches, tmp_path / "a.pt")
    options = {"flatten": "positions", "home": tmp_path / "home"}
    store = saecli.import_array(tmp_path / "a.pt", mask="mask", **options)
    kept = [PADDED[:8, :length][MASK[:8, :length]] for length in lengths]
    np.testing.assert_array_equal(rows_of(store), np.concatenate(kept))
    with pytest.warns(UserWarning, match="add --mask mask"):
        saecli.import_array(tmp_path / "a.pt", "all", **options)


@pytest.mark.parametrize("key", ["x", "layer.6", "group/x"])
def test_a_mask_next_to_the_array_or_to_its_group_is_found(tmp_path, key):
    arrays = {key: PADDED, "layer.7": PADDED, "attention_mask": MASK, "input_ids": IDS}
    torch.save({name: torch.from_numpy(each) for name, each in arrays.items()}, tmp_path / "a.pt")
    options = {"key": key, "flatten": "positions"}
    values = values_of(tmp_path / "a.pt", mask="attention_mask", **options)
    np.testing.assert_array_equal(values["mask"].reshape(40, 9) > 0, MASK)
    np.testing.assert_array_equal(values["token_id"].reshape(40, 9), IDS)
    source = open_array(tmp_path / "a.pt", ImportConfig(**options))
    assert source.likely_mask == "attention_mask"


def test_rows_of_zeros_are_counted_and_left_out_if_asked(tmp_path):
    rows = np.concatenate([PADDED.reshape(-1, 6)[:60], np.zeros((40, 6), np.float32)])
    rows[7] = 0
    np.save(tmp_path / "a.npy", rows)
    with pytest.warns(UserWarning, match="a: 41 of 100 rows are all 0.*--drop-zeros"):
        store = saecli.import_array(tmp_path / "a.npy", home=tmp_path / "home", shard_rows=30)
    assert store.rows == 100
    dropped = saecli.import_array(
        tmp_path / "a.npy", "b", home=tmp_path / "home", shard_rows=30, drop_zeros=True
    )
    assert dropped.meta.dropped == {"all_zero": 41}
    np.testing.assert_array_equal(rows_of(dropped), rows[rows.any(1)])


def test_columns_taken_for_rows_are_warned_of(tmp_path):
    np.save(tmp_path / "a.npy", TOGETHER.T.copy())
    home = tmp_path / "home"
    with pytest.warns(UserWarning, match=r"6 rows of 140 dimensions.*add --transpose"):
        saecli.import_array(tmp_path / "a.npy", home=home)
    turned = saecli.import_array(tmp_path / "a.npy", "b", home=home, transpose=True)
    np.testing.assert_array_equal(rows_of(turned), TOGETHER)


DEEP = np.arange(5 * 4 * 7 * 6, dtype=np.float32).reshape(5, 4, 7, 6)


def entries(length: int) -> st.SearchStrategy[int | slice]:
    return st.integers(-length, length - 1) | st.just(slice(None))


@given(st.integers(0, 4).flatmap(lambda axes: st.tuples(*map(entries, DEEP.shape[:axes]))))
def test_an_index_is_numpys(tmp_path_factory, index):
    path = tmp_path_factory.getbasetemp() / "deep.npy"
    if not path.exists():
        np.save(path, DEEP)
    index = index or (slice(None),)
    words = [str(entry) if isinstance(entry, int) else ":" for entry in index]
    expected = DEEP[index]
    config = {"index": ",".join(words), "flatten": "positions" if expected.ndim > 2 else None}
    if expected.ndim < 2:
        with pytest.raises(FormatError, match="expected an array"):
            values_of(path, **config)
        return
    rows = values_of(path, **config)["rows"]
    np.testing.assert_array_equal(rows, expected.reshape(-1, expected.shape[-1]))
    if expected.ndim == 2:
        np.testing.assert_array_equal(values_of(path, **config, transpose=True)["rows"], expected.T)


def test_raw_numbers_of_each_type(tmp_path):
    for dtype, values in (
        ("bfloat16", torch.from_numpy(TOGETHER).bfloat16()),
        ("float64", torch.from_numpy(TOGETHER).double()),
        ("uint8", torch.arange(120, dtype=torch.uint8).reshape(20, 6)),
    ):
        values.view(torch.uint8).numpy().tofile(tmp_path / "a.dat")
        store = saecli.import_array(
            tmp_path / "a.dat", dtype, home=tmp_path / "home", shape=(-1, 6), dtype=dtype
        )
        assert store.dtype == (dtype if dtype == "bfloat16" else "float32")
        np.testing.assert_array_equal(rows_of(store), values.float().numpy())


def test_the_same_files_are_the_same_store_and_another_order_another(tmp_path):
    pattern, home = write_pattern(tmp_path), tmp_path / "home"
    assert not saecli.import_array(pattern, "s", home=home).cached
    assert saecli.import_array(tmp_path, "s", home=home).path.name == "s"
    files = [tmp_path / f"{number}.npy" for number in range(12)]
    hashes = {
        saecli.import_array(order, name, home=home).meta.request_hash
        for name, order in (("a", files), ("b", files[::-1]))
    }
    assert len(hashes) == 2


def test_one_file_has_one_request_however_it_is_named(tmp_path):
    (tmp_path / "acts").mkdir()
    file = tmp_path / "acts" / "0.npy"
    np.save(file, TOGETHER)
    asked = [file.with_name("*.npy"), file, [file, file], file.parent]
    stores = [saecli.import_array(each, home=tmp_path / "home") for each in asked]
    assert [store.name for store in stores] == ["0", "0", "0", "acts"]
    assert len({store.meta.request_hash for store in stores}) == 1


def test_shards_of_an_index_are_part_of_the_request(tmp_path):
    folder, home = write_index(tmp_path), tmp_path / "home"
    saecli.import_array(folder, "s", home=home, key="*")
    assert saecli.import_array(folder, "s", home=home, key="*").cached
    path = tmp_path / "m-00001-of-00002.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: -tensor for name, tensor in tensors.items()}, path)
    with pytest.raises(StoreError, match="made from something else"):
        saecli.import_array(folder, "s", home=home, key="*")


def test_more_files_than_a_process_can_have_open(tmp_path):
    for number in range(300):
        np.save(tmp_path / f"{number}.npy", PARTS[0])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 30, limits[1]))
    try:
        store = saecli.import_array(tmp_path, "s", home=tmp_path / "home")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert store.rows == 300 * 7


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        (np.ones((3, 5), np.float32), "of float32, 6 dimensions, got 2 axes of float32, 5"),
        (np.ones((3, 6)), "expected 2 axes of float32, 6 .*, got 2 axes of float64"),
        (DEEP, "expected one vector for each position"),
        (None, "damaged or of another"),
    ],
    ids=["width", "dtype", "more axes", "cut"],
)
def test_a_file_that_does_not_fit_is_named(tmp_path, spoilt, said):
    folder, path = write_numpy(tmp_path), tmp_path / "10.npy"
    if spoilt is None:
        path.write_bytes(path.read_bytes()[:150])
    else:
        np.save(path, spoilt)
    with pytest.raises(FormatError, match=rf"10\.npy.*{said}"):
        open_array(folder)


def written(name: str, write: Callable[[Path], object]) -> Callable[[Path], str]:
    def write_in(folder: Path) -> str:
        write(folder / name)
        return str(folder / name)

    return write_in


def saved(value) -> Callable[[Path], str]:
    return written("a.pt", lambda path: torch.save(value() if callable(value) else value, path))


def nested(layout) -> Callable[[Path], str]:
    tensors = [torch.ones(3, 4), torch.ones(2, 4)]
    return saved(lambda: torch.nested.nested_tensor(tensors, layout=layout))


def column(cells: list) -> Callable[[Path], str]:
    return written("a.parquet", partial(parquet.write_table, pyarrow.table({"x": cells})))


def array_of(rows: np.ndarray) -> Callable[[Path], str]:
    return written("a.npy", lambda path: np.save(path, rows))


def named(name: str) -> Callable[[Path], str]:
    return lambda folder: str(folder / name) if "*" in name else name


NESTED, SHAPE = "nested one; save a nested one as", "give their shape and type"
FEW, AXES = array_of(PARTS[3]), "axis 0 of 5, axis 1 of 4, axis 2 of 7, and 6 dimensions"
REFUSED = [  # what writes the file, options, and what is said
    (nested(torch.strided), {}, NESTED),
    (nested(torch.jagged), {}, NESTED),
    (saved(torch.ones(3, 4).to_sparse()), {}, "sparse_coo one"),
    (saved([torch.ones(2, 3), torch.ones(2, 4)]), {}, "a.pt, 1 with"),
    (saved((torch.ones(3, 4),) * 3), {}, "has 3 arrays; choose by"),
    (saved([]), {}, "expected arrays, got none"),
    *((column(cells), {}, r"a\.parquet") for cells in ([[1.0, 2], [1]], [[1.0, 2], None])),
    *((column(cells), {}, r"a\.parquet") for cells in ([["a"]], [[[1.0]]], [])),
    (write_raw, {}, SHAPE),
    (write_raw, {"shape": "11,6", "dtype": "float32"}, "expected 11,6 numbers of float32"),
    (write_raw, {"shape": "-1,33", "dtype": "float32"}, "check --shape and --dtype"),
    (write_raw, {"shape": "6", "dtype": "float32"}, SHAPE),
    (write_raw, {"shape": "-1,0", "dtype": "float32"}, SHAPE),
    (FEW, {"shape": "12,6"}, "--shape does nothing with"),
    (FEW, {"mask": "m"}, "cannot use --mask m .* got none of this name"),
    (FEW, {"index": "12"}, r"of an array of shape \(12, 6\)"),
    (FEW, {"index": "::2"}, "such as ':,2'"),
    (FEW, {"index": "a"}, "such as ':,2'"),
    (FEW, {"index": "2", "transpose": True}, r"got shape \(6,\)"),
    (array_of(DEEP), {"flatten": "positions"}, f"{AXES}: --flatten positions --index : gives 140"),
    (named("*.pt"), {}, "expected files of arrays, got none"),
    (named("digits"), {"index": "0"}, "come whole from scikit-learn"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("write", "options", "said"), REFUSED)
def test_files_and_options_that_give_no_rows_are_refused(tmp_path, write, options, said):
    with pytest.raises((FormatError, ConfigError), match=said):
        values_of(write(tmp_path), **options)


def test_signalling_nans_are_dropped_as_others(tmp_path):
    rows = TOGETHER.copy()
    rows.view(np.uint32)[5, 2] = 0x7FA00000
    np.save(tmp_path / "a.npy", rows)
    with pytest.warns(UserWarning, match="1 row left out, with numbers that are NaN"):
        store = saecli.import_array(tmp_path / "a.npy", home=tmp_path / "home")
    assert (store.rows, store.meta.dropped) == (len(rows) - 1, {"nonfinite": 1})


def test_what_expands_beyond_memory_is_refused(tmp_path, monkeypatch):
    group = tmp_path / "cgroup"
    group.mkdir()
    for name, content in (("max", str(4 << 20)), ("current", "0"), ("stat", "")):
        (group / f"memory.{name}").write_text(content)
    (tmp_path / "own").write_text("0::/\n")
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1 << 13, 1 << 10), np.float32))
    zeros = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(np.zeros(1 << 22)), 1 << 10)
    parquet.write_table(pyarrow.table({"x": zeros}), tmp_path / "a.parquet", use_dictionary=False)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        options = {"chunks": (1 << 12, 1 << 10), "compression": "gzip"}
        file.create_dataset("x", data=np.zeros((1 << 12, 1 << 10)), **options)
    monkeypatch.setattr(machine, "CGROUP", group)
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "own")
    for name in ("a.npz", "a.parquet", "a.h5"):
        assert (tmp_path / name).stat().st_size < 40e6
        with pytest.raises(FormatError, match=rf"{name}: expected .* of free memory"):
            open_array(tmp_path / name)
    with pytest.raises(FormatError, match=r"expected 33\.6 MB of free memory"):
        read_npz(tmp_path / "a.npz")
