"""The values given for a command's configuration options, on the command line and in a file; and the Typer parameter of
an option.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter
from itertools import product
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from ...base.errors import ConfigError, flag_of
from ...base.options import KINDS, PAPER, Config, Option, choose, options_of
from ..help_page import help_all_parameter
from ..outline import kind_of
from .config_file import config_parameter, naming


def parameter_of(option: Option) -> Parameter:
    """The Typer parameter of an option."""
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
        flag += f"/{flag_of('no_' + option.name)}"  # so that the command line can undo a file's
    if option.several:
        kind = list[kind]  # type: ignore[valid-type]
        default = None if default is None else [default]
    return Parameter(
        option.name, Parameter.KEYWORD_ONLY, default=default,
        annotation=Annotated[kind | None if option.default is None else kind, typer.Option(flag, **settings)])


def own_options(parameters: Mapping[str, Parameter]) -> dict[str, Option]:
    """The options among a command's own parameters, by name, without positional arguments."""
    found = {}
    for name, parameter in parameters.items():
        if get_origin(parameter.annotation) is not Annotated:
            continue
        annotation, info = get_args(parameter.annotation)
        if isinstance(info, typer.models.OptionInfo):
            kind, choices, several = kind_of(annotation)
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
                return text  # the configuration checks it
            raise typer.BadParameter(f"{text!r} is neither a number nor {' nor '.join(option.choices)}") from None

    return parse


ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True)
class Given:
    """The configuration options of one invocation.

    Args:
        values: value by option name.
        given: the options that the user set, as opposed to left at their defaults.
        varied: this combination's values of the options that the user set to several.
    """

    values: Mapping[str, Any]
    given: frozenset[str]
    varied: Mapping[str, Any] = field(default_factory=dict)

    def config(self, kind: type[ConfigT]) -> ConfigT:
        """Build one configuration from the options that were set; the others keep its own defaults."""
        return kind(**{name: self.values[name] for name in options_of(kind).keys() & self.given})

    def else_given(self, values: Mapping[str, Any]) -> "Given":
        """The same with these values of options that the user did not set, as if they had been set."""
        return replace(self, values={**self.values, **{name: value for name, value in values.items()
                                                       if name not in self.given}},
                       given=self.given | values.keys())

    def choose(self, table: Mapping[str, type[Config]], selector: str, name: str) -> Config:
        """Build the configuration that a table holds under `name`; see `config.choose`."""
        return choose(table, selector, name, self.values, self.given)


def configured(*configs: type[Config], repeated: bool = False, advanced: Collection[str] = (),
               beside: Collection[Option] = (), **tables: Mapping[str, type[Config]]) -> Callable:
    """Decorate a command function with the options of configurations.

    The function's parameter `options` receives a `Given`, or if options may be repeated one per combination of values,
    the last option's changing fastest. The help page shows each option in its own panel, else in its configuration's.
    All of the function's options may also be given in the file of `--config`. If some are advanced, only `--help-all`
    shows them; the returned function lists them in `advanced`, for the command's `--help`.

    Args:
        *configs: configurations whose fields all become options.
        repeated: whether numbers, except those declared `once`, may be given several values.
        advanced: which of the function's own options are advanced.
        beside: further options, of configurations that the function builds itself.
        **tables: tables of configurations, each with an option of that name to select an entry; fields that several
            entries have in common become one option, and help texts name the entries that take an option.
    """
    declared = [replace(one, panel=one.panel or config.panel) for config in configs
                for one in options_of(config).values()]
    for selector, table in tables.items():
        declared += [replace(one, panel=one.panel or f"Options of --{selector}") for one in _merged(table)]
    options = {one.name: replace(one, several=repeated and one.repeatable) for one in [*declared, *beside]}

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function, eval_str=True)
        own = {name: parameter for name, parameter in signature.parameters.items() if name != "options"}
        left_out = {*advanced, *(name for name, one in options.items() if one.advanced)}
        shown = sorted(options.values(), key=lambda one: one.panel == PAPER["panel"])
        added = [config_parameter(options | own_options(own)), *[help_all_parameter()] * bool(left_out)]

        @functools.wraps(function)
        def command(**arguments: Any) -> Any:
            values = {name: arguments.pop(name) for name in options}
            ctx, file = arguments["ctx"], arguments.pop("config")
            arguments.pop("help_all", None)
            given = frozenset(name for name in values if ctx.get_parameter_source(name).name != "DEFAULT")
            with naming(ctx, file):
                combined = _combinations(values, given) if repeated else Given(values, given)
                return function(options=combined, **arguments)

        everything = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                      for one in [*own.values(), *added, *map(parameter_of, shown)]]
        command.__signature__ = signature.replace(parameters=everything)
        command.__annotations__ = {one.name: one.annotation for one in everything}
        command.advanced = frozenset(left_out)
        return command

    return decorate


def _merged(table: Mapping[str, type[Config]]) -> list[Option]:
    """The options of a table's configurations; if not all entries take an option, its help names those that do."""
    takers: dict[str, list[str]] = {}
    found: dict[str, Option] = {}
    for key, config in table.items():
        for name, one in options_of(config).items():
            found.setdefault(name, one)
            takers.setdefault(name, []).append(key)
    return [one if len(takers[name]) == len(table) else replace(one, help=f"{one.help} ({', '.join(takers[name])})")
            for name, one in found.items()]


def _combinations(values: Mapping[str, Any], given: frozenset[str]) -> tuple[Given, ...]:
    """A `Given` per combination of the values of repeated options; ConfigError if an option was given a value twice."""
    several = {name: value for name, value in values.items() if isinstance(value, list)}
    for name, words in several.items():
        if twice := [word for index, word in enumerate(words) if word in words[:index]]:
            raise ConfigError(f"{flag_of(name)} {twice[0]} is given twice; give each value once, for one SAE per "
                              "value", option=name)
    varying = [name for name, words in several.items() if len(words) > 1]
    result = []
    for combination in product(*several.values()):
        chosen = dict(zip(several, combination, strict=True))
        result.append(Given({**values, **chosen}, given, {name: chosen[name] for name in varying}))
    return tuple(result)
