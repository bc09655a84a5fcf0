"""From an `Option` to Typer's parameter, and from a parameter that a command declares itself to its `Option`."""

import enum
import types
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from ..config import KINDS, Option, flag_of, scalar_types


def parameter_of(option: Option) -> Parameter:
    """The parameter that stands for an option on the command line."""
    default = option.default
    settings: dict[str, Any] = {"help": option.help, "rich_help_panel": option.panel, "metavar": option.metavar,
                                "show_default": default is not None and default is not False}
    if len(option.kinds) > 1:
        numeric = next(kind for kind in option.kinds if kind is not str)
        settings |= {"parser": _word_or_number(option, numeric), "autocompletion": lambda: list(option.choices),
                     "metavar": option.metavar or f"{'|'.join(option.choices)}|{numeric.__name__.upper()}"}
        kind: Any = str
    else:
        kind = Literal[option.choices] if option.choices else option.kinds[0]  # type: ignore[valid-type]
    flag = flag_of(option.name)
    if kind is bool:
        flag += f"/{flag_of('no_' + option.name)}"  # what a file switches on, the command line can switch off
    if option.several:
        settings["metavar"] = (settings["metavar"] or f"<{kind.__name__}>") + " ..."
        kind = list[kind]  # type: ignore[valid-type]
        default = None if default is None else [default]
    return Parameter(
        option.name, Parameter.KEYWORD_ONLY, default=default,
        annotation=Annotated[kind | None if option.default is None else kind, typer.Option(flag, **settings)])


def own_options(parameters: Mapping[str, Parameter]) -> dict[str, Option]:
    """The options among a command's own parameters, by name; a positional argument is none."""
    found = {}
    for name, parameter in parameters.items():
        if get_origin(parameter.annotation) is not Annotated:
            continue
        annotation, info = get_args(parameter.annotation)
        if isinstance(info, typer.models.OptionInfo):
            (kind,) = (kind for kind in scalar_types(annotation) if kind is not types.NoneType)
            several = get_origin(kind) is list
            if several:
                (kind,) = get_args(kind)
            choices = get_args(kind) if get_origin(kind) is Literal else ()
            if isinstance(kind, enum.EnumType):
                choices = tuple(member.value for member in kind)
            found[name] = Option(info.help or "", name, (kind,) if kind in KINDS else (str,), choices=choices,
                                 several=several)
    return found


def _word_or_number(option: Option, numeric: type) -> Callable[[str], str | int | float]:
    def parse(text: str) -> str | int | float:
        if text in option.choices:
            return text
        try:
            return numeric(text)
        except ValueError:
            if option.check is not None:
                return text  # the configuration looks at it
            raise typer.BadParameter(f"{text!r} is neither a number nor {' nor '.join(option.choices)}") from None

    return parse
