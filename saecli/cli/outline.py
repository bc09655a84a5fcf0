"""Outlines of commands: their help texts and parameters, kept as JSON in `assets/help/`.

Help pages and shell completion are made from these, since importing a command takes more than a second, most of it
torch. The tests compare every outline with its command, and write it anew on demand.
"""

import importlib
import inspect
import json
import types
from collections.abc import Callable, Mapping
from enum import Enum
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from ..base.options import scalar_types
from .help_page import Command, help_all_parameter

FOLDER = Path(__file__).parents[1] / "assets" / "help"
KINDS: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, Path)}
VALUES = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}  # how a page writes an option's value
SHOWN = ("help", "metavar", "rich_help_panel", "show_default", "min", "max")  # what a page shows of a parameter


def loaded(name: str) -> Command:
    """The command of that name, from its module."""
    function = importlib.import_module(f".commands.{'import_' if name == 'import' else name}", __package__).command
    paragraphs = inspect.getdoc(function).split("\n\n")
    return _built(name, function, "\n\n".join(" ".join(lines.split()) for lines in paragraphs),
                  getattr(function, "advanced", Command.advanced), getattr(function, "spelling", None))


def is_outlined(name: str) -> bool:
    """Whether the command of that name has an outline."""
    return (FOLDER / f"{name}.json").exists()


def outlined(name: str) -> Command:
    """A command with the help page and the completions of the one of that name; it does nothing."""
    kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))

    def function(**arguments: Any) -> None:
        """Take what the signature says."""

    parameters = [_parameter(one) for one in kept["parameters"]]
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {one.name: one.annotation for one in parameters}
    advanced = frozenset(one["name"] for one in kept["parameters"] if "advanced" in one)
    return _built(name, function, kept["help"], advanced)


def outline_of(command: Command) -> str:
    """The outline of a loaded command, as JSON with a line per parameter."""
    signature = inspect.signature(command.callback, eval_str=True)
    lines = [json.dumps(_described(one, one.name in command.advanced), ensure_ascii=False)
             for one in signature.parameters.values() if get_origin(one.annotation) is Annotated]
    words = json.dumps(command.help, ensure_ascii=False)
    return f'{{"help": {words},\n "parameters": [\n  {f",{chr(10)}  ".join(lines)}]}}\n'


def _built(name: str, function: Callable, words: str, advanced: frozenset[str],
           spelling: Callable[[str], str] | None = None) -> Command:
    """A Typer command with the parameters of a function, a text for its help page, the names of the parameters that
    only `--help-all` shows, and what makes a choice of an option from another spelling of it."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name, cls=Command, help=words, context_settings={"token_normalize_func": spelling})(function)
    command = typer.main.get_command(app)
    command.advanced = advanced
    return command


def kind_of(annotation: Any) -> tuple[Any, tuple[str, ...], bool]:
    """The type of a parameter's values, the words it is limited to, and whether it takes several."""
    (kind,) = (one for one in scalar_types(annotation) if one is not types.NoneType)
    if several := get_origin(kind) is list:
        (kind,) = get_args(kind)
    if get_origin(kind) is Literal:
        return str, get_args(kind), several
    if isinstance(kind, type) and issubclass(kind, Enum):
        return str, tuple(member.value for member in kind), several
    return kind, (), several


def _described(parameter: Parameter, advanced: bool) -> dict[str, Any]:
    """The outline's entry for a command's parameter."""
    annotation, info = get_args(parameter.annotation)
    kind, choices, several = kind_of(annotation)
    flags = [flag for flag in (info.default, *(info.param_decls or ())) if isinstance(flag, str)]
    completed = info.autocompletion
    if completed is not None:  # a function of the context that `options` exports, or one that gives fixed words
        completed = completed.__name__ if inspect.signature(completed).parameters else completed()
    unset = typer.Option()
    found = {"name": parameter.name, "flags": flags, "kind": kind.__name__, "choices": [*choices],
             "several": several or None, "required": parameter.default is Parameter.empty or None,
             "default": None if parameter.default is Parameter.empty else parameter.default,
             "advanced": advanced or None, "completed": completed,
             **{name: getattr(info, name) for name in SHOWN if getattr(info, name) != getattr(unset, name)}}
    return {name: value for name, value in found.items() if value is not None and value != []}


def _parameter(entry: Mapping[str, Any]) -> Parameter:
    """The parameter that an outline's entry describes."""
    if entry["name"] == "help_all":
        return help_all_parameter()
    choices = entry.get("choices", ())
    kind: Any = Enum("Choice", [(word, word) for word in choices], type=str) if choices else KINDS[entry["kind"]]
    settings = {name: entry[name] for name in SHOWN if name in entry}
    if "flags" in entry and kind is not bool:
        value = entry.get("metavar") or "|".join(choices) or VALUES[kind]
        settings["metavar"] = value + " ..." * bool(entry.get("several"))
    kind = list[kind] if entry.get("several") else kind
    if completed := entry.get("completed"):
        settings["autocompletion"] = _completing(completed)
    info = typer.Option(*entry["flags"], **settings) if "flags" in entry else typer.Argument(**settings)
    return Parameter(entry["name"], Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info],
                     default=Parameter.empty if entry.get("required") else entry.get("default"))


def _completing(completed: str | list[str]) -> Callable:
    """The function that completes a parameter's values."""
    def of_home(ctx: typer.Context) -> list[str]:
        return getattr(importlib.import_module("saecli.cli.options", __package__), completed)(ctx)

    return of_home if isinstance(completed, str) else lambda: completed
