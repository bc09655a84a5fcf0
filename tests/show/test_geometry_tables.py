"""The table of `sae geometry`: the power diagram's line, the price, and 80 columns."""

from copy import deepcopy
from typing import Any

import pytest
from homes import CommandLine, make_run, make_store, random_sae, some_rows
from rich.console import Console, RenderableType

from saecli.sae.activations import TopK
from saecli.show.tables import disagreement, geometries_table, geometry_table


def shown(table: RenderableType) -> list[list[str]]:
    """The cells of each line of a table in a pipe."""
    console = Console(width=160, highlight=False)
    with console.capture() as taken:
        console.print(table)
    lines = taken.get().splitlines()
    return [[cell.strip() for cell in line[1:-1].split("│")] for line in lines if line.startswith("│")]


def about(table: RenderableType, name: str) -> list[list[str]]:
    """What lines whose first cell begins so say."""
    return [cells[1:] for cells in shown(table) if cells[0].startswith(name)]


@pytest.fixture
def document(sae: CommandLine) -> dict[str, Any]:
    make_store(sae.home, "rows", some_rows(1500))
    make_run(sae.home, "one", random_sae(TopK(3)))
    return sae("geometry", "one", "--json").json


def test_a_theorem_takes_one_line_with_the_rows_that_it_was_checked_on(document: dict[str, Any]):
    diagram = document["power_diagram"]
    rows = diagram["rows"]
    assert (diagram["agreement"], diagram["ties"]) == (1, 0)
    assert about(geometry_table(document), "power") == [["agrees", f"on {rows} rows"]]
    assert disagreement(diagram) is None
    diagram["ties"] = 1
    assert about(geometry_table(document), "power") == [["agrees", f"on {rows - 1} rows; 1 tie left out"]]
    diagram["ties"], diagram["agreement"] = rows, None
    assert about(geometry_table(document), "power") == [["-", f"no row but {rows} ties"]]
    del document["power_diagram"]
    assert about(geometry_table(document | {"power_diagram": None}), "power") == []


def test_rows_that_break_the_theorem_stand_out(document: dict[str, Any]):
    console = Console(width=80, force_terminal=True)
    broken = deepcopy(document)
    compared = broken["power_diagram"]
    compared["ties"], decided = 2, compared["rows"] - 2
    for wrong in (1, 3, 100):
        compared["agreement"] = (decided - wrong) / decided
        assert about(geometry_table(broken), "power") == [["disagrees", f"on {wrong} of {decided} rows"]]
        assert disagreement(broken["power_diagram"]) == f"on {wrong} of {decided} rows"
        with console.capture() as taken:
            console.print(geometry_table(broken))
        assert "\x1b[1;31mdisagrees" in taken.get()


def test_the_price_comes_with_its_rows_and_cells_or_not_at_all(document: dict[str, Any]):
    own = document["references"]["own_cells"]
    assert own["enough"]
    behind = f"{own['rows_measured']} rows, {own['cells']} own cells"
    table = geometry_table(document)
    assert about(table, "FVU of local PCA on own cells") == [[f"{own['local_pca_fvu']:.4g}", behind]]
    assert about(table, "price") == [[f"{own['price']:.4g}", f"SAE {own['sae_fvu']:.4g} there, less that"]]
    few = deepcopy(document)
    few["references"]["own_cells"] |= {"enough": False, "rows_measured": 8, "cells": 1}
    table = geometry_table(few)
    assert about(table, "FVU of local PCA on") == []
    assert about(table, "price") == [["-", "too few: 8 rows, 1 own cell"]]
    none = deepcopy(few)
    none["references"]["own_cells"] |= {"rows_measured": 0, "cells": 0, "price": None}
    assert about(geometry_table(none), "price") == [["-", "no own cell has enough rows"]]
    assert [cells[-3:] for cells in about(geometries_table([document, few, none]), "one")][-3:] == [
        [f"{own['price']:.4g}", str(own["rows_measured"]), str(own["cells"])], ["too few", "8", "1"],
        ["too few", "0", "0"]]
