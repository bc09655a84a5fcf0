"""A store open for reading: choosing rows, checking shards."""

from collections.abc import Callable
from pathlib import Path
from typing import Self

from ..base.errors import StoreError
from .checks import damaged_world, find_damage
from .chunks import Chunks
from .rows import Rows
from .schema import SHARDS, StoreMeta, read_meta
from .shard import read_layout
from .split import TEST_FRACTION, Split, Which


class ActivationStore(Chunks):
    """A store open for reading; of an unfinished one, the whole shards.

    Attributes:
        homed: whether it is in the home, where its name finds it.
        cached: whether the command that would make it found it finished.
    """

    cached = False

    def __init__(self, path: Path, meta: StoreMeta, homed: bool = True) -> None:
        super().__init__(path, meta)
        self.homed = homed

    @classmethod
    def open(cls, path: Path, homed: bool = True) -> Self:
        """Open the store in a folder; damage to a shard is found when the shard is first read."""
        return cls(path, read_meta(path), homed)

    def __repr__(self) -> str:
        unfinished = "" if self.complete else ", unfinished"
        return (f"ActivationStore({self.name!r}, rows={self.rows}, d_in={self.d_in}, {self.dtype}{unfinished}, "
                f"path={str(self.path)!r})")

    @property
    def reference(self) -> str:
        """The store's name, or its folder if it is outside the home."""
        return self.name if self.homed else str(self.path.resolve())

    @property
    def stored_bytes(self) -> int:
        return self.rows * self.meta.row_bytes

    @property
    def complete(self) -> bool:
        return self.meta.complete

    def split(self, which: Which, *, fraction: float = 1.0, seed: int = 0,
              test_fraction: float = TEST_FRACTION) -> Rows:
        """Choose rows: by document where the store knows documents, else by row.

        Args:
            which: "train", "test" (held out) or "all".
            fraction: fraction of the training rows to keep, in (0, 1]; smaller fractions are subsets of larger ones,
                and the test rows do not depend on it.
            seed: another seed holds out other rows.
            test_fraction: fraction of the documents held out, in [0, 1). Unless it is 0, at least one of two or more
                documents is held out, and at least one is trained on.

        Raises:
            ConfigError: an argument out of its range.
            StoreError: the split is empty, or a shard is damaged.

        Cost: reads and hashes the document of every row (about 50 ms per million rows).
        """
        return Rows.chosen(self, Split(which, fraction, seed, test_fraction))

    def verify(self, show: Callable[[float], None] = lambda read: None) -> list[str]:
        return find_damage(self.path, self.meta, show)

    def misfits(self) -> list[str]:
        """A sentence if a shard or `world.safetensors` differs from its description in `store.json`.

        Cost: opens every shard, and reads no activations.
        """
        try:
            for shard in self.meta.shards:
                read_layout(self.path / SHARDS / shard.file, self.meta, shard)
        except StoreError as error:
            return [str(error)]
        return damaged_world(self.path, self.meta)
