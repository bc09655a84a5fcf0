"""Tables as people read them: on narrow terminals, with long names and paths, and with names that look like markup."""

from typing import Any

import numpy as np
import pytest
from homes import CommandLine, make_run, make_store, random_sae, some_rows
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from test_commands_eval import relu_oracle

from saecli.base.tables import table
from saecli.base.wording import number
from saecli.sae.activations import TopK
from saecli.store.split import is_test

STORE, RUN = "rows-of-several-days", "a-run-with-a-rather-long-name"  # 20 and 29 characters
NASTY = ("[red]x", "[red", "\\[b]", ":cat:", "$x$")


def printed(columns: list[str], rows: list[list[Any]], width: int, title: str | None = None) -> list[str]:
    """The lines of a table on a console of that width."""
    console = Console(width=width, highlight=False)
    with console.capture() as taken:
        console.print(table(title, columns, rows))
    lines = taken.get().splitlines()
    assert max(map(cell_len, lines)) <= width
    return lines


def bands(lines: list[str]) -> list[list[list[str]]]:
    """The cells of the bands of printed tables, line by line, headers left out."""
    found: list[list[list[str]]] = []
    for line in lines:
        if line.startswith("┏"):
            found.append([])
        elif line.startswith("│"):
            found[-1].append([cell.strip() for cell in line[1:-1].split("│")])
    return found


def unbroken(lines: list[str]) -> list[list[str]]:
    """The cells of each row, its bands put together; every band begins with the same names."""
    first, *others = bands(lines)
    assert all([row[0] for row in band] == [row[0] for row in first] for band in others)
    return [[first[place][0], *(cell for band in (first, *others) for cell in band[place][1:])]
            for place in range(len(first))]


words = st.text("ab[]/:.漢", min_size=1, max_size=24).filter(lambda text: ":cat:" not in text)
cells = st.one_of(st.none(), st.integers(-10**9, 10**9), st.floats(), st.text("ab[]/_", max_size=20))


@given(st.sampled_from([60, 80, 140]), st.data())
def test_names_and_figures_stand_unbroken_and_in_order_within_the_width(width: int, data: st.DataObject):
    count = data.draw(st.integers(1, 12))
    heads = data.draw(st.lists(st.text("ab ", min_size=1, max_size=24), min_size=count + 1, max_size=count + 1))
    rows = data.draw(st.lists(st.tuples(words, *[cells] * count), min_size=1, max_size=12))
    expected = [[name, *(cell if isinstance(cell, str) else number(cell) for cell in row)] for name, *row in rows]
    assert unbroken(printed(heads, [list(row) for row in rows], width)) == expected


def test_columns_stand_side_by_side_where_they_fit_with_headers_folded_first():
    rows = [["first", 0.5, 1.5, 2.5]]
    columns = ["run", "one long header", "another long header", "a third header"]
    wide, folded, stacked = (printed(columns, rows, width) for width in (80, 42, 30))
    assert [len(bands(lines)) for lines in (wide, folded, stacked)] == [1, 1, 2]
    assert wide[1].count("long header") == 2 and "long header" not in "".join(folded)
    for lines in (wide, folded, stacked):
        assert unbroken(lines) == [["first", "0.5", "1.5", "2.5"]]


@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_long_path_is_folded_and_not_the_key_beside_it(width: int):
    path = "/a/folder/that/is/quite/far/down/" + "x" * 80
    (band,) = bands(printed(["", "store"], [["dropped: special", 311], ["path", path]], width))
    assert band[0] == ["dropped: special", "311"]
    assert [row[0] for row in band[1:]] == ["path", *[""] * (len(band) - 2)]
    assert "".join(row[1] for row in band[1:]) == path


def test_a_name_too_long_for_a_line_is_folded_and_its_figures_are_not():
    for width in (40, 60, 80):
        found = bands(printed(["run", "fvu", "kl"], [["n" * 90, 0.1606, 0.3879]], width))
        rows = [[cell for row in band for cell in row if cell] for band in found]
        assert all("".join(cell for cell in row if cell[0] == "n") == "n" * 90 for row in rows)
        assert [cell for row in rows for cell in row if cell[0] != "n"] == ["0.1606", "0.3879"]


@pytest.mark.parametrize("width", [80, 62, 50])
def test_long_cells_fold_between_words_and_short_ones_not_at_all(width: int):
    details = ["5% to 95%: 0.0001286 to 0.007477", "1.5% at 69.33"]
    lines = printed(["measure", "size", "detail"], [["margin over row norm", "5.57 MB", detail] for detail in details],
                    width)
    shown = [cell for band in bands(lines) for row in band for cell in row]
    assert {"5.57 MB", details[1]} <= set(shown)
    assert (details[0] in shown) == (width == 80)
    assert len(bands(lines)) == (1 if width > 50 else 2)
    assert " ".join(cell for row in bands(lines)[-1] for cell in row[-1:] if cell).startswith(details[0])


def test_a_column_of_long_words_folds_before_the_names_do():
    lines = printed(["run", "data", "fvu"], [[RUN, STORE, 0.1606]], 50)
    assert [band[0][0] for band in bands(lines)] == [RUN, RUN]
    assert "".join(row[1] for row in bands(lines)[0]) == STORE
    assert bands(lines)[1] == [[RUN, "0.1606"]]


@pytest.mark.parametrize("width", range(1, 20))
def test_any_width_prints_something(width: int):
    assert Console(width=width).render_lines(table("title", ["run", "fvu"], [["first", 0.5], ["漢字", None]]))


@pytest.mark.parametrize("name", [*NASTY, "[/]", "[/red]"])
def test_names_that_look_like_markup_are_shown_as_they_are(name: str):
    assert bands(printed([name, name], [[name, name]], 80, title=name)) == [[[name, name]]]
    assert printed([name, name], [[name, name]], 80, title=name)[0] == name


@pytest.mark.parametrize("columns", [80, 60])
def test_every_figure_of_eval_and_sparsity_is_whole_on_narrow_terminals(sae: CommandLine, monkeypatch, columns: int):
    rows = make_store(sae.home, STORE, some_rows())
    names = [f"{RUN}-{seed}" for seed in range(12)]
    for seed, name in enumerate(names):
        make_run(sae.home, name, random_sae(seed=seed), data=STORE)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = sae("eval", *names).out.splitlines()
    assert max(map(cell_len, lines)) <= columns
    shown = {row[0].removesuffix(" *"): row for row in unbroken(lines)}
    for seed, name in enumerate(names):
        oracle = relu_oracle(random_sae(seed=seed), rows[is_test(np.arange(len(rows)))])
        figures = [float(cell.replace(",", "")) for cell in shown[name][1:] if cell[-1].isdigit()]
        for value in oracle.values():
            assert min(abs(figure - value) for figure in figures) <= 1e-3 * abs(value)
    lines = [line for line in sae("sparsity", *names).out.splitlines() if line[:1] in "┏┃┡│└"]
    assert max(map(cell_len, lines)) <= columns
    assert [row[0] for row in unbroken(lines)] == names


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 60])
def test_import_train_geometry_and_list_print_within_narrow_terminals(sae: CommandLine, monkeypatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    brief = ["--epochs", "1", "--d-sae", "16", "--data", STORE]
    printed_by = [sae("import", "digits", "--name", STORE), sae("train", *brief, "--name", RUN),
                  sae("train", *brief, "--act", "topk", "--k", "3", "--k", "4", "--name", RUN),
                  sae("geometry", RUN), sae("geometry", RUN, f"{RUN}-k3"), sae("list")]
    names = {RUN, f"{RUN}-k3", f"{RUN}-k4"}
    for done in printed_by:
        assert done.status == 0, done.err
        lines = [line for line in done.out.splitlines() if line[:1] in "┏┃┡│└"]
        assert lines and max(map(cell_len, lines)) <= columns
        cells = {cell for band in bands(lines) for row in band for cell in row}
        assert not {cell for cell in cells if cell.startswith(("a-", "rows-")) and cell not in (*names, STORE)}


def test_a_pipe_has_lines_of_140_characters_or_of_columns(sae: CommandLine, monkeypatch):
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "run", random_sae(TopK(3)))
    monkeypatch.delenv("COLUMNS", raising=False)
    assert len(bands(sae("eval").out.splitlines())) == 1
    monkeypatch.setenv("COLUMNS", "60")
    assert len(bands(sae("eval").out.splitlines())) > 1


def test_runs_whose_names_look_like_markup_are_measured_on_a_terminal(sae: CommandLine, monkeypatch):
    make_store(sae.home, "rows", some_rows())
    for name in NASTY:
        make_run(sae.home, name, random_sae())
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, to rich, which shows progress bars there
    monkeypatch.setenv("COLUMNS", "80")
    done = sae("eval", *NASTY)
    assert done.status == 0, done.err
    assert all(name in done.out and f"measuring {name}" in done.err for name in NASTY)
