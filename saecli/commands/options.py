"""Command-line options: the shared ones, and those made from configurations."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from ..config import Config, Option, choose, fields, flag_of, scalar_types
from ..console import Console
from ..errors import ConfigError
from ..files import check_place, is_free
from ..home import Home
from .config_file import Key, config_parameter, naming

ConfigT = TypeVar("ConfigT", bound=Config)


def store_names(ctx: typer.Context) -> list[str]:
    """What a shell completes to the name of a store."""
    return _home(ctx).stores.names()


def run_names(ctx: typer.Context) -> list[str]:
    """What a shell completes to the name of a run."""
    return _home(ctx).runs.names()


def unfinished_names(ctx: typer.Context) -> list[str]:
    """What a shell completes to the name of a run to go on with."""
    return _home(ctx).runs.unfinished()


def _home(ctx: typer.Context) -> Home:
    return Home(Path(ctx.find_root().params["home"]))  # while a shell completes a line, no session is made


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, everything else on stderr.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Save a picture here (PNG, PDF or SVG by its ending).")]
Run = Annotated[str | None, typer.Argument(
    metavar="RUN", help="Run name, folder that holds an SAE, or such as user/repo/folder@revision on the Hugging Face "
                        "hub.",
    show_default="the newest run", autocompletion=run_names)]
Runs = Annotated[list[str] | None, typer.Argument(
    metavar="RUN", help="Run names, folders that hold an SAE, or such as user/repo/folder@revision on the Hugging Face "
                        "hub.",
    show_default="the newest run", autocompletion=run_names)]
Device = Annotated[str, typer.Option("--device", help="Where to compute: cpu, cuda, cuda:1; auto takes cuda where "
                                                      "there is one.")]


@dataclass(frozen=True)
class Session:
    """What every command is handed: where things live, and how to speak.

    Args:
        home: the folder of stores and runs.
        console: the output sink.
    """

    home: Home
    console: Console


def start(ctx: typer.Context, as_json: bool, plot: Path | None = None, csv: Path | None = None,
          out: Path | None = None) -> Session:
    """The session of a command, its console set to tables or to JSON.

    Args:
        ctx: the command's context.
        as_json: what `--json` says.
        plot: the picture to draw.
        csv: the table to write.
        out: the folder to write, new or empty.

    Raises:
        ConfigError: the picture is of no known kind, or one of them cannot be written where it is asked for; better
            said before the work than after it.
    """
    if plot is not None:
        from ..plots import check_suffix  # matplotlib takes a second to import

        check_suffix(plot)
    if out is not None and not is_free(out):
        raise ConfigError(f"cannot write to {out}: expected an empty or a new folder, got one in use; name another")
    for path in (plot, csv, out):
        if path is not None:
            try:
                check_place(path / "index.html" if path is out else path)
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {error.strerror or error}; name another place") from error
    return Session(ctx.find_root().obj, Console(as_json))


@dataclass(frozen=True)
class Given:
    """The configuration options of one invocation.

    Args:
        values: value by field name.
        given: the fields that the user set, as opposed to left at their defaults.
        varied: of the fields that the user set to several values, this one's.
    """

    values: Mapping[str, Any]
    given: frozenset[str]
    varied: Mapping[str, Any] = field(default_factory=dict)

    def config(self, kind: type[ConfigT]) -> ConfigT:
        """Build one configuration from the options that were set; the others keep its own defaults."""
        own = {f.name for f, _, _ in fields(kind)}
        return kind(**{name: self.values[name] for name in own & self.given})

    def choose(self, table: Mapping[str, type[Config]], selector: str, name: str) -> Config:
        """Build the configuration that a table holds under `name`; see `config.choose`."""
        return choose(table, selector, name, self.values, self.given)


def configured(*configs: type[Config], repeated: bool = False, **tables: Mapping[str, type[Config]]) -> Callable:
    """Give a command function the options of configurations.

    The function's parameter `options` receives a `Given`, or where options may be repeated one for each combination of
    the values, the last option's changing fastest; on the command line each configuration field
    stands as an option of its own, in a help panel of its configuration's. All of the function's options
    may stand in the file of `--config` too.

    Args:
        *configs: configurations whose fields all become options.
        repeated: whether numbers may be given several values each, but for those declared `once`.
        **tables: tables of configurations of which the option of that name selects one; fields that
            several entries share become one option, and each help text says which entries take it.
    """
    parameters, keys = {}, {}

    def declare(declared: tuple, panel: str, note: str = "", one_default: bool = True) -> None:
        f, annotation, rule = declared
        several = repeated and _repeats(annotation, rule)
        parameters[f.name] = _parameter(f.name, annotation, rule, f.default, panel, note, one_default, several)
        keys[f.name] = Key.of_field(annotation, rule, several)

    for config in configs:
        for declared in fields(config):
            declare(declared, config.panel)
    for selector, table in tables.items():
        for takers in _takers(table).values():
            defaults = {str(taken[0].default) for taken in takers.values()}
            note = "" if len(takers) == len(table) else f" ({', '.join(takers)})"
            declare(next(iter(takers.values())), f"Options of --{selector}", note, one_default=len(defaults) == 1)

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != "options"]
        in_file = keys | {p.name: key for p in own if (key := Key.of_parameter(p))}

        @functools.wraps(function)
        def command(**arguments: Any) -> Any:
            values = {name: arguments.pop(name) for name in parameters}
            ctx, file = arguments["ctx"], arguments.pop("config")
            given = frozenset(name for name in values if ctx.get_parameter_source(name).name != "DEFAULT")
            with naming(ctx, file):
                options = _combinations(values, given) if repeated else Given(values, given)
                return function(options=options, **arguments)

        everything = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                      for p in [*own, config_parameter(in_file), *parameters.values()]]
        command.__signature__ = signature.replace(parameters=everything)
        command.__annotations__ = {p.name: p.annotation for p in everything}
        return command

    return decorate


def _repeats(annotation: Any, rule: Option) -> bool:
    return not rule.once and not {int, float}.isdisjoint(scalar_types(annotation))


def _combinations(values: Mapping[str, Any], given: frozenset[str]) -> tuple[Given, ...]:
    """What was given, once for each combination of the values of options that were given several.

    Raises:
        ConfigError: an option was given one value twice.
    """
    several = {name: value for name, value in values.items() if isinstance(value, list)}
    for name, words in several.items():
        if twice := [word for place, word in enumerate(words) if word in words[:place]]:
            raise ConfigError(f"{flag_of(name)} {twice[0]} is given twice; give each value once, for one SAE a value")
    varying = [name for name, words in several.items() if len(words) > 1]
    result = []
    for combination in product(*several.values()):
        chosen = dict(zip(several, combination, strict=True))
        result.append(Given({**values, **chosen}, given, {name: chosen[name] for name in varying}))
    return tuple(result)


def _takers(table: Mapping[str, type[Config]]) -> dict[str, dict[str, tuple]]:
    """For each field name of a table's configurations, the entries that have it."""
    takers: dict[str, dict[str, tuple]] = {}
    for key, config in table.items():
        for declared in fields(config):
            takers.setdefault(declared[0].name, {})[key] = declared
    return takers


def _parameter(name: str, annotation: Any, rule: Option, default: Any, panel: str, note: str, one_default: bool,
               several: bool) -> inspect.Parameter:
    kinds = tuple(t for t in scalar_types(annotation) if t is not types.NoneType)
    settings: dict[str, Any] = {"help": rule.help + note, "rich_help_panel": panel, "metavar": rule.metavar,
                                "show_default": one_default and default is not None and default is not MISSING}
    if len(kinds) > 1:
        numeric = next(kind for kind in kinds if kind is not str)
        settings |= {"parser": _word_or_number(rule, numeric), "autocompletion": lambda: list(rule.choices),
                     "metavar": rule.metavar or f"{'|'.join(rule.choices)}|{numeric.__name__.upper()}"}
        kind: Any = str
    else:
        kind = Literal[rule.choices] if rule.choices else kinds[0]  # type: ignore[valid-type]
    flag = f"{flag_of(name)}/{flag_of('no_' + name)}" if default is True else flag_of(name)
    optional = default is None
    if several:
        settings["metavar"] = (settings["metavar"] or f"<{kind.__name__}>") + " ..."
        kind = list[kind]  # type: ignore[valid-type]
        default = default if default in (None, MISSING) else [default]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=... if default is MISSING else default,
        annotation=Annotated[kind | None if optional else kind, typer.Option(flag, **settings)])


def _word_or_number(rule: Option, numeric: type) -> Callable[[str], str | int | float]:
    def parse(text: str) -> str | int | float:
        if text in rule.choices:
            return text
        try:
            return numeric(text)
        except ValueError:
            if rule.check is not None:
                return text  # the configuration looks at it
            raise typer.BadParameter(f"{text!r} is neither a number nor {' nor '.join(rule.choices)}") from None

    return parse
