"""Tables as people read them: whole in a pipe, folded on narrow terminals, and with names that look like markup."""

import pytest
from homes import CommandLine, make_run, make_store, random_sae, some_rows
from rich.cells import cell_len
from rich.console import Console

from saecli.show.tables import table

NASTY = ("[red]x", "[red", "\\[b]", ":cat:", "$x$", "[/]")
COLUMNS = ["run", "latents", "mean of a measure", "note"]
ROWS = [["a-rather-long-name-of-a-run", 4096, 0.160612, "5% to 95%: 0.1 to 0.2"], ["short", 12, None, "none"]]


def printed(title: str | None, columns: list[str], rows: list[list[object]], width: int) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as taken:
        console.print(table(title, columns, rows))
    lines = taken.get().splitlines()
    assert max(map(cell_len, lines)) <= width
    return lines


def joined(lines: list[str]) -> list[list[str]]:
    """The cells of each row, folded ones put together; a row begins where its first cell is not a rest."""
    return [[cell.strip() for cell in line[1:-1].split("│")] for line in lines if line.startswith("│")]


def test_a_wide_console_shows_figures_whole_and_names_left():
    lines = printed("the title", COLUMNS, ROWS, 100)
    assert lines[0] == "the title"
    assert joined(lines) == [["a-rather-long-name-of-a-run", "4,096", "0.1606", "5% to 95%: 0.1 to 0.2"],
                             ["short", "12", "-", "none"]]


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_narrow_console_folds_and_loses_no_letter(width: int):
    shown = joined(printed(None, COLUMNS, ROWS, width))
    for place, whole in enumerate(["a-rather-long-name-of-a-runshort", "4,09612", "0.1606-", "5%to95%:0.1to0.2none"]):
        assert "".join(row[place] for row in shown).replace(" ", "") == whole


@pytest.mark.parametrize("name", NASTY)
def test_names_that_look_like_markup_are_shown_as_they_are(name: str):
    lines = printed(name, [name, name], [[name, name]], 80)
    assert (lines[0], joined(lines)) == (name, [[name, name]])


def test_eval_of_nasty_names_prints_within_the_terminal(sae: CommandLine, monkeypatch: pytest.MonkeyPatch):
    make_store(sae.home, "rows", some_rows())
    for name in NASTY[:5]:
        make_run(sae.home, name, random_sae())
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, to rich, which shows progress bars there
    monkeypatch.setenv("COLUMNS", "160")
    done = sae("eval", *NASTY[:5])
    assert done.status == 0, done.err
    assert all(name in done.out and f"measuring {name}" in done.err for name in NASTY[:5])
