"""The data of a package sae-probes, whose code may not run."""

import csv
from collections.abc import Iterable
from pathlib import Path

import pytest
import zstandard

KINDS = {"9_other": "Multiclass"}  # of sets but for binary ones


def write(path: Path, columns: tuple[str, str], lines: Iterable[tuple[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zstandard.open(path, "wt", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *lines])


def install(
    site: Path, sets: dict[str, list[tuple[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Puts a package on the path with these sets of prompts and targets; returns its data's folder."""
    data = site / "sae_probes" / "data"
    kinds = dict.fromkeys(sets, "Binary Classification") | KINDS
    listed = [(f"cleaned_data/{name}.csv", kind) for name, kind in kinds.items()]
    write(data / "probing_datasets_MASTER.csv.zst", ("Dataset save name", "Data type"), listed)
    for name, lines in sets.items():
        write(data / f"cleaned_data/{name}.csv.zst", ("prompt", "target"), lines)
    (data.parent / "__init__.py").write_text("raise ImportError('its data need none of it')")
    monkeypatch.syspath_prepend(site)
    return data
