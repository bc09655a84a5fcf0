"""The page of `sae --help`, in the frames that Typer gives the pages of commands, but drawn without rich.

Importing what Typer renders with takes as long as Typer itself, and rich's tables alone half as long.
"""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import typer

ROUND, PLAIN = "╭─╮│╰╯", "+-+|++"  # corners and edges, and those for an output that cannot show the others
LEAST_WIDTH = 50


def show_root_help(group: Any, ctx: Any) -> None:
    """Print the page, as wide as the terminal.

    Args:
        group: the group of all commands.
        ctx: its context, which makes formatters.
    """
    edges = ROUND if (sys.stdout.encoding or "").lower().startswith("utf") else PLAIN
    width = max(LEAST_WIDTH, shutil.get_terminal_size().columns)
    head = ctx.formatter_class(width=width - 2)
    group.format_usage(ctx, head)
    group.format_help_text(ctx, head)
    records = filter(None, (parameter.get_help_record(ctx) for parameter in group.get_params(ctx)))
    options = [(names, words.replace("\\[", "[")) for names, words in records]  # as older Typers mark them for rich
    commands = [(name, group.get_command(ctx, name).help) for name in group.list_commands(ctx)]
    page = ["", *(f" {line}".rstrip() for line in head.getvalue().splitlines()), ""]
    page += _framed("Options", options, width, edges) + _framed("Commands", commands, width, edges)
    # Printed here as Typer does: of what is returned to it, it shows nothing where there were no arguments.
    typer.echo("\n".join(page), color=False if os.environ.get("NO_COLOR") else None)


def _framed(title: str, entries: Sequence[tuple[str, str]], width: int, edges: str) -> list[str]:
    """The lines of a frame around names, each with what it does."""
    left, line, right, side, low_left, low_right = edges
    column = max(len(name) for name, _ in entries) + 2
    room = width - 4 - column
    side = typer.style(side, dim=True)
    lines = [typer.style(f"{left}{line} {title} ".ljust(width - 1, line) + right, dim=True)]
    for name, words in entries:
        for part in textwrap.wrap(words, room):
            shown = typer.style(name.ljust(column), fg=typer.colors.CYAN, bold=True)
            lines.append(f"{side} {shown}{part.ljust(room)} {side}")
            name = ""
    return [*lines, typer.style(low_left + line * (width - 2) + low_right, dim=True)]
