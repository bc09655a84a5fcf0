"""Tables as people read them: whole in a pipe, folded on narrow terminals, with names that look like markup."""

import json
from typing import Any

import pytest
from homes import make_run, make_store, random_sae, some_rows
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from saecli.base import console as base
from saecli.show.measures import places_table
from saecli.show.tables import table

NASTY = ("[red]x", "[red", "\\[b]", ":cat:", "$x$", "[/]")
COLUMNS = ["run", "latents", "mean of a measure", "note"]
ROWS = [
    ["a-rather-long-name-of-a-run", 4096, 0.160612, "5% to 95%: 0.1 to 0.2"],
    ["short", 12, None, "none"],
]


def printed(*shown: RenderableType, width: int = 160, **options: Any) -> list[str]:
    console = Console(width=width, highlight=False, **options)
    with console.capture() as taken:
        console.print(*shown)
    lines = taken.get().splitlines()
    assert options or max(map(cell_len, lines)) <= width
    return lines


def joined(lines: list[str]) -> list[list[str]]:
    """The cells of each line of a printed table."""
    return [
        [cell.strip() for cell in line[1:-1].split("│")] for line in lines if line.startswith("│")
    ]


def test_a_wide_console_shows_figures_whole_and_names_left():
    lines = printed(table("the title", COLUMNS, ROWS), width=100)
    assert lines[0] == "the title"
    assert joined(lines) == [
        ["a-rather-long-name-of-a-run", "4,096", "0.1606", "5% to 95%: 0.1 to 0.2"],
        ["short", "12", "-", "none"],
    ]


@pytest.mark.parametrize("width", [50, 60, 70])
def test_a_narrow_console_folds_phrases_and_stacks_columns(width: int):
    lines = printed(table(None, COLUMNS, ROWS), width=width)
    assert sum(line.startswith("┏") for line in lines) == (2 if width == 50 else 1)
    shown = " ".join(cell for row in joined(lines) for cell in row)
    for whole in ("a-rather-long-name-of-a-run", "4,096", "0.1606", "0.2"):
        assert whole in shown


def test_a_long_path_folds_and_loses_no_letter():
    shown = joined(printed(table(None, ["", "store"], [["path", "/a/" + "x" * 80]]), width=40))
    assert "".join(row[1] for row in shown) == "/a/" + "x" * 80


@pytest.mark.parametrize("name", NASTY)
def test_names_that_look_like_markup_are_shown_as_they_are(name: str):
    lines = printed(table(name, [name, name], [[name, name]]), width=80)
    assert (lines[0], joined(lines)) == (name, [[name, name]])


def test_eval_of_nasty_names_prints_within_the_terminal(sae, monkeypatch):
    make_store(sae.home, "rows", some_rows())
    for name in NASTY[:5]:
        make_run(sae.home, name, random_sae())
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, to rich, which shows progress bars there
    monkeypatch.setenv("COLUMNS", "160")
    done = sae("eval", *NASTY[:5]).succeeds()
    assert all(name in done.out and f"measuring {name}" in done.err for name in NASTY[:5])


def test_latents_of_a_crosscoder_are_listed_by_class_but_for_shared_ones():
    place = {"width": 4, "fvu": 0.1, "exclusive": 0}
    places = [{"name": name, **place} for name in ("first", "second")]
    classes = ["shared", "only first by latent scaling", "in between"]
    run = {"run": "x", "places": places, "shared": 2, "class": classes}
    lines = printed(places_table(run), width=250)
    said = "\n".join(lines)
    assert "of 3 latents 2 are shared by all hook points, 0 exclusive" in said
    assert "1 in between" in said and "x: shared" not in said
    assert "x: only first by latent scaling: 1" in [line.strip() for line in lines]


HOSTILE = "a\x1b[2Jb\x9b31mc\x7fd\u202ee\r\ud800"


def test_a_warning_about_a_store_of_several_runs_is_given_once(capsys):
    console = base.Console()
    for text in ("one", "two", "one"):
        console.warn(text)
    assert capsys.readouterr().err.split() == ["one", "two"]


@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_that_is_printed_controls_the_terminal(capsys, as_json: bool):
    shown = (
        HOSTILE,
        table(HOSTILE, [HOSTILE, "b"], [[HOSTILE, "c"]]),
        Text(HOSTILE, style="bold"),
        Group(HOSTILE, Panel(HOSTILE)),
    )
    console = base.Console(as_json)
    console.print_result({HOSTILE: HOSTILE}, *shown)
    console.note(HOSTILE)
    with console.progress(HOSTILE, 2, HOSTILE) as step:
        step(1, HOSTILE)
    said = capsys.readouterr()
    assert all(letter.isprintable() or letter == "\n" for letter in said.out + said.err)
    if as_json:
        assert json.loads(said.out) == {HOSTILE: HOSTILE}
    else:
        assert "a\\x1b[2Jb\\x9b31mc\\x7fd\\u202ee\\r\\ud800" in said.out
