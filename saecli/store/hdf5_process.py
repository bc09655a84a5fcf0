"""The process that reads an HDF5 file for `arrays.py`: `python hdf5_process.py FILE`.

Each line of input is a request, a JSON object, and is answered by a line that is one too:

- `{}`: `{"datasets": [NAME, ...], "links": {NAME: WHY, ...}}`, with why each link cannot be imported.
- `{"key": NAME}`: `{"shape", "dtype", "type", "held"}`, as in `Array` and NumPy; or `{"refused": WHY}`.
- `{"key": NAME, "outer": [NUMBER, ...], "begin": NUMBER, "end": NUMBER}`: `{}`, and then the bytes of these numbers.

A file that the library cannot read ends the process.
"""

import json
import math
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np

FILTERS = {
    h5py.h5z.FILTER_DEFLATE,
    h5py.h5z.FILTER_SHUFFLE,
    h5py.h5z.FILTER_FLETCHER32,
    h5py.h5z.FILTER_LZF,
}
SPARE = 256 << 20  # bytes of memory for the library, in addition to chunks
STATM = Path("/proc/self/statm")
IN_FILE = "write them into a dataset of this file"


class Refused(Exception):  # noqa: N818 - it is an answer
    """A dataset that must not be read; the message says why."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted command ends this process itself
    path = Path(sys.argv[1])
    limit_memory(0)
    file = h5py.File(path, "r", locking=False)
    opened: dict[str, tuple[h5py.Dataset, int]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        key, values = request.get("key"), None
        if "begin" in request:
            dataset, held = opened[key]
            index = (*request["outer"], slice(request["begin"], request["end"]))
            asked = (request["end"] - request["begin"]) * math.prod(dataset.shape[len(index) :])
            limit_memory(held + 2 * asked * dataset.dtype.itemsize)
            values, answer = np.ascontiguousarray(dataset[index]), {}
        elif key is None:
            answer = names(file)
        else:
            try:
                answer, access = describe(file[key], path.stat().st_size)
                opened[key] = (
                    h5py.Dataset(h5py.h5d.open(file.id, key.encode(), access)),
                    answer["held"],
                )
            except Refused as error:
                answer = {"refused": str(error)}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        if values is not None:
            sys.stdout.buffer.write(values.data)
        sys.stdout.buffer.flush()


def limit_memory(more: int) -> None:
    """Limit memory to `more` bytes and `SPARE` above the size at the start, if the system reports that."""
    if not STATM.exists():
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    wanted = BASE + SPARE + more
    resource.setrlimit(
        resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most)
    )


BASE = (
    int(STATM.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    if STATM.exists()
    else 0
)


def names(file: h5py.File) -> dict[str, Any]:
    """The file's datasets, and why each of its links cannot be imported."""
    datasets: list[str] = []
    links: dict[str, str] = {}

    def add(key: str, item: h5py.HLObject) -> None:
        if isinstance(item, h5py.Dataset):
            datasets.append(key)
        elif isinstance(item, h5py.Group):
            add_links(item, f"{key}/")

    def add_links(group: h5py.Group, place: str) -> None:
        for name in group:
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                links[place + name] = (
                    f"is a link to {link.path} of the file {link.filename}; import that one"
                )
            elif isinstance(link, h5py.SoftLink):
                links[place + name] = f"is a link to {link.path}; give where it leads to as --key"

    add_links(file, "")
    file.visititems(add)
    return {"datasets": datasets, "links": links}


def describe(dataset: h5py.Dataset, size: int) -> tuple[dict[str, Any], h5py.h5p.PropDAID]:
    """Describe a dataset of a file of `size` bytes without following references out of it, or raise `Refused`.

    Returns the answer, and how to open the dataset for reading.
    """
    made, access = dataset.id.get_create_plist(), h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    if made.get_layout() == h5py.h5d.VIRTUAL:  # even its shape may lie in other files
        raise Refused(f"is virtual, with its numbers in other datasets; {IN_FILE}")
    if made.get_external_count():
        raise Refused(
            f"is external, with its numbers in the file {in_words(made.get_external(0)[0])}; {IN_FILE}"
        )
    for code, _, _, name in (made.get_filter(number) for number in range(made.get_nfilters())):
        if code not in FILTERS:
            raise Refused(
                f"is compressed by {in_words(name) or f'filter {code}'}; write it with gzip, lzf or neither"
            )
    try:
        dtype = dataset.dtype
    except TypeError:
        raise Refused("has a type that NumPy lacks; give one of real numbers") from None
    shape, itemsize, held = dataset.shape or (), dataset.id.get_type().get_size(), 0
    stored, whole = dataset.id.get_storage_size(), math.prod(shape) * itemsize
    if stored > size:
        raise Refused(
            f"claims {stored:,} bytes of a file of {size:,}; check that the file is whole"
        )
    if made.get_layout() == h5py.h5d.CHUNKED:
        chunk = made.get_chunk()
        counts = [-(-length // own) for length, own in zip(shape, chunk, strict=True)]
        stored, whole = dataset.id.get_num_chunks(), math.prod(counts)
        # Rows are read in order, and chunks are cached until all of their rows have been read.
        axis = next((axis for axis, own in enumerate(chunk) if own > 1), len(chunk) - 1)
        chunks = math.prod(counts[axis + 1 :])
        cache, slots = chunks * math.prod(chunk) * itemsize, max(521, 4 * chunks + 1)
        access.set_chunk_cache(slots, cache, 1.0)
        held = (
            cache + 8 * slots + 4 * math.prod(chunk) * itemsize
        )  # one more chunk, as stored and after each filter
    if stored < whole:
        raise Refused(
            f"was not written in full ({stored:,} of {whole:,} {'chunks' if held else 'bytes'} are there); "
            "write the rest, or cut it to what is there"
        )
    # A store's bfloat16 is a float of two bytes that h5py gives as float32.
    name = "bfloat16" if dtype == np.float32 and itemsize == 2 else dtype.name
    return {"shape": shape, "dtype": name, "type": dtype.str, "held": held}, access


def in_words(name: bytes) -> str:
    return name.decode(errors="replace")


if __name__ == "__main__":
    main()
