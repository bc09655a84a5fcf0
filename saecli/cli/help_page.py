"""The pages of `sae --help` and `sae COMMAND --help`, framed like Typer's, but drawn without rich.

Importing Typer's renderer takes as long as Typer itself, and rich's tables alone half as long. Its tables also have a
column for types, which on a terminal of 80 columns leaves 25 for an option's description.
"""

import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from inspect import Parameter
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..base.errors import ConfigError, flag_of
from ..base.other_names import in_place_of

ROUND, PLAIN = "╭─╮│╰╯", "+-+|++"  # corners and edges: in UTF, and for other encodings
LEAST_WIDTH = 50
LONGEST_NAME = 26  # letters of an option and its value; a longer one has a line of its own


class Command(TyperCommand):
    """A command that takes options in any spelling, and whose `--help` leaves the advanced ones to `--help-all`."""

    advanced: frozenset[str] = frozenset()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command's words, options in any spelling: `--d_sae` is `--d-sae`."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        words = [*self._spelled(ctx, args)]
        demand_once(self, ctx, words)
        return super().parse_args(ctx, words)

    def _spelled(self, ctx: Any, args: list[str]) -> Iterator[str]:
        """The words with hyphens in the names of options; ConfigError for an option of another tool."""
        flags = {flag for one in self.get_params(ctx) for flag in (*one.opts, *one.secondary_opts)}
        rest = iter(args)
        for word in rest:
            flag, equals, value = word.partition("=")
            name = flag.removeprefix("--").replace("-", "_").lower()
            if word == "--":
                yield from (word, *rest)
            elif not flag.startswith("--") or flag in flags:
                yield word
            elif flag_of(name) in flags:
                yield flag_of(name) + equals + value
            elif remedy := in_place_of(name, {one.name for one in self.params}):
                raise ConfigError(f"{ctx.command_path} has no option {flag}; {remedy}")
            else:
                yield word

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page of `--help`."""
        note = f"{ctx.command_path} --help-all shows {len(self.advanced)} more options." if self.advanced else ""
        _show(self, ctx, _panels(self, ctx, self.advanced), note)

    def show_all(self, ctx: Any) -> None:
        """Print the page of `--help-all`."""
        _show(self, ctx, _panels(self, ctx, frozenset()))


def demand_once(command: Any, ctx: Any, words: Sequence[str]) -> None:
    """ConfigError if the words give an option that takes one value twice."""
    _, _, order = command.make_parser(ctx).parse_args(args=[*words])
    for index, one in enumerate(order):
        if one in order[:index] and not (one.multiple or one.is_flag):
            raise ConfigError(f"{one.opts[0]} is given twice: expected one value; leave one of them out")


def help_all_parameter() -> Parameter:
    """The parameter that prints the help page with all options, and exits."""

    def show(ctx: typer.Context, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            ctx.command.show_all(ctx)
            raise typer.Exit

    option = typer.Option("--help-all", help="Show all options, and exit.", is_eager=True, callback=show)
    return Parameter("help_all", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option])


def show_root_help(group: Any, ctx: Any) -> None:
    """Print the page of a group with its commands."""
    commands = [(name, group.get_command(ctx, name).help) for name in group.list_commands(ctx)]
    _show(group, ctx, _panels(group, ctx, frozenset()) | {"Commands": commands})


def _panels(command: Any, ctx: Any, left_out: frozenset[str]) -> dict[str, list[tuple[str, str]]]:
    """The parameters of each panel, as names and descriptions; arguments first."""
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        if parameter.name not in left_out and (record := parameter.get_help_record(ctx)):
            named = parameter.param_type_name == "option"
            panel = getattr(parameter, "rich_help_panel", None) or ("Options" if named else "Arguments")
            words = record[1].replace("\\[", "[")  # older Typers escape brackets for rich
            words = re.sub(r"\[default: \((.+)\)\]$", r"[default: \1]", " ".join(words.split()))
            panels.setdefault(panel, []).append((_written(parameter), words))
    return {title: entries for title, entries in panels.items() if entries}


def _written(parameter: Any) -> str:
    """A parameter's names, and the value that an option takes."""
    if parameter.param_type_name == "argument":
        return (parameter.metavar or parameter.name.upper()) + " ..." * (parameter.nargs == -1)
    names = " / ".join(", ".join(sorted(flags, key=len))
                       for flags in (parameter.opts, parameter.secondary_opts) if flags)
    return names if parameter.is_flag else f"{names} {parameter.metavar}"


def _show(command: Any, ctx: Any, panels: dict[str, list[tuple[str, str]]], note: str = "") -> None:
    """Print a page, as wide as the terminal."""
    edges = ROUND if (sys.stdout.encoding or "").lower().startswith("utf") else PLAIN
    width = max(LEAST_WIDTH, shutil.get_terminal_size().columns)
    head = ctx.formatter_class(width=width - 2)
    command.format_usage(ctx, head)
    page = ["", *(f" {line}".rstrip() for line in head.getvalue().splitlines()), ""]
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        page += [*_wrapped(paragraph, width - 2, "   " + " " * (len(paragraph) - len(paragraph.lstrip()))), ""]
    for title, entries in panels.items():
        page += _framed(title, entries, width, edges)
    page += [f" {note}"] * bool(note)
    # Printed here, since Typer drops returned text if there were no arguments.
    typer.echo("\n".join(page), color=False if os.environ.get("NO_COLOR") else None)


def _framed(title: str, entries: Sequence[tuple[str, str]], width: int, edges: str) -> list[str]:
    """The lines of a frame around names and descriptions."""
    left, line, right, side, low_left, low_right = edges
    column = max((len(name) for name, _ in entries if len(name) <= LONGEST_NAME), default=LONGEST_NAME) + 2
    side = typer.style(side, dim=True)
    lines = [typer.style(f"{left}{line} {title} ".ljust(width - 1, line) + right, dim=True)]
    for name, words in entries:
        *above, beside = _broken(name, width - 4) if len(name) > LONGEST_NAME else [name]
        if len(beside) > column - 2:
            above, beside = [*above, beside], ""
        lines += [f"{side} {_name(part.ljust(width - 4))} {side}" for part in above]
        for part in _wrapped(words, width - 4 - column):
            lines.append(f"{side} {_name(beside.ljust(column))}{part.ljust(width - 4 - column)} {side}")
            beside = ""
    return [*lines, typer.style(low_left + line * (width - 2) + low_right, dim=True)]


def _wrapped(words: str, room: int, indent: str = "") -> list[str]:
    """A paragraph in lines of whole words, none broken at its hyphens."""
    return textwrap.wrap(" ".join(words.split()), room, break_on_hyphens=False, initial_indent=indent,
                         subsequent_indent=indent)


def _name(text: str) -> str:
    return typer.style(text, fg=typer.colors.CYAN, bold=True)


def _broken(name: str, room: int) -> list[str]:
    """A name in lines that fit, broken between the choices of its value."""
    lines = [""]
    for part in re.split(r"(?<=[| ])", name):
        if len(lines[-1]) + len(part) > room:
            lines.append("  ")
        lines[-1] += part
    return lines
