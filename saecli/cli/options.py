"""Options on the command line: Typer parameters of configurations, options common to commands, and a command's start.

An option is declared once, by `base.options.option` or here, and becomes a parameter, a key in the file of `--config`
and a line of help. Nothing here imports torch.
"""

import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from inspect import Parameter
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from ..base import interrupts
from ..base.console import Console
from ..base.errors import ConfigError, flag_of
from ..base.files import check_place, is_free
from ..base.home import Home
from ..base.options import KINDS, PAPER, Config, Option, choose, options_of, scalar_types
from .config_file import config_parameter, naming

ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True)
class Given:
    """The configuration options of one invocation.

    Args:
        given: the options that the user set.
        varied: this combination's values of the options that the user set to several.
    """

    values: Mapping[str, Any]
    given: frozenset[str]
    varied: Mapping[str, Any] = field(default_factory=dict)

    def config(self, kind: type[ConfigT]) -> ConfigT:
        """Build a configuration from the options that were set."""
        return kind(**{name: self.values[name] for name in options_of(kind).keys() & self.given})

    def else_given(self, values: Mapping[str, Any]) -> "Given":
        """The same with these values for options that the user did not set."""
        return replace(self, values=dict(values) | {name: value for name, value in self.values.items()
                                                    if name in self.given or name not in values},
                       given=self.given | values.keys())

    def choose(self, table: Mapping[str, type[ConfigT]], selector: str, name: str) -> ConfigT:
        """Build the configuration that a table holds under `name`; see `base.options.choose`."""
        return choose(table, selector, name, self.values, self.given)


def configured(*configs: type[Config], repeated: bool = False, advanced: Collection[str] = (),
               more: Collection[Option] = (), **tables: Mapping[str, type[Config]]) -> Callable:
    """Decorate a command function with the options of configurations.

    The function's parameter `options` receives a `Given`, or if options may be repeated one per combination of values,
    the last option's changing fastest. All of the function's options may also be given in the file of `--config`.
    Advanced ones are shown by `--help-all` only; the returned function lists them in `advanced`.

    Args:
        *configs: configurations whose fields all become options.
        repeated: whether numbers, except those declared `once`, may be given several values.
        advanced: which of the function's own options are advanced.
        more: further options, of configurations that the function builds itself.
        **tables: tables of configurations, each with an option of that name to select an entry; an option of several
            entries is one option, whose help names them.
    """
    declared = [replace(one, panel=one.panel or config.panel) for config in configs
                for one in options_of(config).values()]
    for selector, table in tables.items():
        declared += [replace(one, panel=one.panel or f"Options of --{selector}") for one in _merged(table)]
    options = {one.name: replace(one, several=repeated and one.repeatable) for one in [*declared, *more]}

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function, eval_str=True)
        own = {name: parameter for name, parameter in signature.parameters.items() if name != "options"}
        shown = sorted(options.values(), key=lambda one: one.panel == PAPER["panel"])

        @functools.wraps(function)
        def command(**arguments: Any) -> Any:
            values = {name: arguments.pop(name) for name in options}
            ctx, file = arguments["ctx"], arguments.pop("config")
            given = frozenset(name for name in values if is_given(ctx, name))
            with naming(ctx, file):
                combined = _combinations(values, given) if repeated else Given(values, given)
                return function(options=combined, **arguments)

        everything = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in
                      [*own.values(), config_parameter(options | own_options(own)), *map(parameter_of, shown)]]
        command.__signature__ = signature.replace(parameters=everything)  # type: ignore[attr-defined]  # Typer reads it
        command.__annotations__ = {one.name: one.annotation for one in everything}
        command.advanced = {*advanced, *(one.name for one in options.values() if one.advanced)}  # type: ignore[attr-defined]  # LazyGroup reads it
        return command

    return decorate


def parameter_of(option: Option) -> Parameter:
    default = option.default
    settings: dict[str, Any] = {"help": option.help, "rich_help_panel": option.panel, "metavar": option.metavar,
                                "show_default": default is not None and default is not False}
    if len(option.kinds) > 1:
        numeric = next(kind for kind in option.kinds if kind is not str)
        settings |= {"parser": _word_or_number(option, numeric), "autocompletion": lambda: list(option.choices),
                     "metavar": option.metavar or f"{'|'.join(option.choices)}|{numeric.__name__.upper()}"}
        kind: Any = str
    else:
        kind = Literal[option.choices] if option.choices else option.kinds[0]
    flag = flag_of(option.name)
    if kind is bool:
        flag += f"/{flag_of('no_' + option.name)}"  # so that the command line can undo a file's
    if option.several:
        kind = list[kind]
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
            kind, choices, several = _kind_of(annotation)
            found[name] = Option(info.help or "", name, (kind,) if kind in KINDS else (str,), choices=choices,
                                 several=several)
    return found


def _kind_of(annotation: Any) -> tuple[Any, tuple[str, ...], bool]:
    """Type of a parameter's values, its choices, and whether it takes several."""
    (kind,) = (one for one in scalar_types(annotation) if one is not types.NoneType)
    if several := get_origin(kind) is list:
        (kind,) = get_args(kind)
    if get_origin(kind) is Literal:
        return str, get_args(kind), several
    if isinstance(kind, type) and issubclass(kind, Enum):
        return str, tuple(member.value for member in kind), several
    return kind, (), several


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
    """A `Given` per combination of the values of repeated options; ConfigError if a value is repeated."""
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


def is_given(ctx: Any, name: str, source: str = "") -> bool:
    """Whether the user set an option, on the command line or in a file; or by that source."""
    found = ctx.get_parameter_source(name)
    return found is not None and (found.name == source if source else found.name != "DEFAULT")


def given(ctx: typer.Context, name: str) -> Any:
    """An option's value as given by the user; None if it has its default."""
    return ctx.params[name] if is_given(ctx, name) else None


def store_names(ctx: typer.Context) -> list[str]:
    """Names of stores, for shell completion; likewise below."""
    return _home(ctx).stores.names()


def run_names(ctx: typer.Context) -> list[str]:
    return _home(ctx).runs.names()


def all_names(ctx: typer.Context) -> list[str]:
    return [*run_names(ctx), *store_names(ctx)]


def unfinished_names(ctx: typer.Context) -> list[str]:
    return _home(ctx).runs.unfinished()


def _home(ctx: typer.Context) -> Home:
    return Home(Path(ctx.find_root().params["home"]))  # there is no session during completion


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, everything else on stderr.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Save a picture here (PNG, PDF or SVG by its ending).")]
Csv = Annotated[Path | None, typer.Option("--csv", dir_okay=False, help="Write the measures here, with every digit.")]
Run = Annotated[str | None, typer.Argument(
    metavar="RUN", help="Run name, folder that holds an SAE, or user/repo/folder@revision on the Hugging Face hub.",
    show_default="the newest run", autocompletion=run_names)]
Runs = Annotated[list[str] | None, typer.Argument(
    metavar="RUN", help="Run names, folders that hold an SAE, or user/repo/folder@revision on the Hugging Face hub.",
    show_default="the newest run", autocompletion=run_names)]
Device = Annotated[str, typer.Option("--device", help="Where to compute: cpu, cuda, cuda:1; auto: cuda if available.")]
Data = Annotated[list[str] | None, typer.Option(
    "--data", help="Activation store, by name or folder; for a crosscoder several, in order.",
    autocompletion=store_names, show_default="the one that the run was trained on, else the newest",
    callback=lambda names: names or None)]  # without it typer gives an empty list
Target = Annotated[str | None, typer.Option(
    "--target", help="Store of a transcoder's targets.", autocompletion=store_names,
    show_default="the one that the run was trained on")]
SplitName = Annotated[Literal["test", "train", "all"], typer.Option(
    "--split", help="Rows to measure on: test, held out; train, trained on; or all.")]
Model = Annotated[str | None, typer.Option(
    "--model", help="Splice the SAE into this language model, which the store's rows came from: hub id or folder.",
    show_default="none")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Tokens of the split to run --model on.")]
TOKENS = 16_384  # default of --tokens; see `measure.evaluate`


@dataclass(frozen=True)
class Session:
    """The home and the output of a command."""

    home: Home
    console: Console


def start(ctx: typer.Context, as_json: bool, plot: Path | None = None, csv: Path | None = None,
          out: Path | None = None) -> Session:
    """Begin a command, after its imports: from now on Ctrl-C is a KeyboardInterrupt. ConfigError if a path cannot be
    written."""
    interrupts.begin()
    if plot is not None:
        from ..show.style import check_suffix  # matplotlib takes a second to import

        check_suffix(plot)
    if out is not None and not is_free(out):
        raise ConfigError(f"cannot write to {out}: expected an empty or a new folder, got one in use; name another")
    for path in (plot, csv, out):
        if path is not None:
            try:
                there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
                check_place(there / "index.html" if path is out else path)
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {error.strerror or error}; name another path") from error
    return Session(ctx.find_root().obj, Console(as_json))
