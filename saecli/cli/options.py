"""Options as Typer parameters and in the file of `--config`, those common to commands, and a command's start."""

import functools
import inspect
import json
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import Parameter
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from ..base import interrupts
from ..base.console import Console
from ..base.errors import ConfigError, did_you_mean, flag_of, one_line
from ..base.files import check_place, is_free, regular, write_csv
from ..base.home import Home
from ..base.options import (
    KINDS,
    PAPER,
    Config,
    Option,
    options_of,
    scalar_types,
    toml_lines,
)
from ..extract.options import SITES


@dataclass(frozen=True)
class Given:
    """The options of configurations that the user set: one of the combinations of their values."""

    values: Mapping[str, Any]
    varied: Mapping[str, Any]  # of options set to several values


def configured(
    *configs: type[Config],
    repeated: bool = False,
    advanced: Collection[str] = (),
    more: Collection[Option] = (),
    **tables: Mapping[str, type[Config]],
) -> Callable:
    """Decorate a command with options of configurations, of tables of them by the option that selects an entry, and
    `--config`. The parameter `options` receives those that the user set; if they can be `repeated`, `Given` ones.
    `advanced` names those of its own options that `--help-all` alone shows."""
    declared = [
        replace(one, panel=one.panel or config.panel)
        for config in configs
        for one in options_of(config).values()
    ]
    for selector, table in tables.items():
        declared += [
            replace(one, panel=one.panel or f"Options of --{selector}") for one in _merged(table)
        ]
    options = {
        one.name: replace(one, several=one.several or (repeated and one.repeatable))
        for one in [*declared, *more]
    }

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function, eval_str=True)
        own = {
            name: parameter for name, parameter in signature.parameters.items() if name != "options"
        }
        shown = sorted(options.values(), key=lambda one: one.panel == PAPER["panel"])

        @functools.wraps(function)
        def command(**arguments: Any) -> Any:
            values = {name: arguments.pop(name) for name in options}
            ctx, file = arguments["ctx"], arguments.pop("config")
            given = {name: value for name, value in values.items() if is_given(ctx, name)}
            with _naming(ctx, file):
                return function(
                    options=_combinations(given, options) if repeated else given, **arguments
                )

        everything = [
            one.replace(kind=Parameter.KEYWORD_ONLY)
            for one in [
                *own.values(),
                _config_parameter(options | _own_options(own)),
                *map(_parameter, shown),
            ]
        ]
        command.__signature__ = signature.replace(parameters=everything)  # type: ignore[attr-defined]  # Typer reads it
        command.__annotations__ = {one.name: one.annotation for one in everything}
        command.advanced = {*advanced, *(one.name for one in options.values() if one.advanced)}  # type: ignore[attr-defined]  # LazyGroup reads it
        return command

    return decorate


def _merged(table: Mapping[str, type[Config]]) -> list[Option]:
    """The options of a table's configurations; help of one that not all entries take names those that do."""
    declared = {key: options_of(config) for key, config in table.items()}
    takers = {
        name: [key for key in table if name in declared[key]]
        for one in declared.values()
        for name in one
    }
    found = {name: declared[keys[0]][name] for name, keys in takers.items()}
    return [
        one
        if len(takers[name]) == len(table)
        else replace(one, help=f"{one.help} ({', '.join(takers[name])})")
        for name, one in found.items()
    ]


def _combinations(given: Mapping[str, Any], options: Mapping[str, Option]) -> tuple[Given, ...]:
    several = {
        name: value
        for name, value in given.items()
        if isinstance(value, list) and not options[name].once
    }
    for name, words in several.items():
        if twice := [word for index, word in enumerate(words) if word in words[:index]]:
            raise ConfigError(
                f"{flag_of(name)} {twice[0]} is given twice; give each value once, for one SAE per value"
            )
    chosen = [
        dict(zip(several, combination, strict=True)) for combination in product(*several.values())
    ]
    return tuple(
        Given({**given, **one}, {name: one[name] for name in one if len(several[name]) > 1})
        for one in chosen
    )


def _parameter(option: Option) -> Parameter:
    default = option.default
    settings: dict[str, Any] = {
        "help": option.help,
        "rich_help_panel": option.panel,
        "metavar": option.metavar,
        "show_default": default is not None and default is not False,
    }
    kind: Any = Literal[option.choices] if option.choices else option.kinds[0]
    if len(option.kinds) > 1:
        kind, numeric = str, next(kind for kind in option.kinds if kind is not str)
        settings |= {
            "parser": functools.partial(word_or_number, option, numeric),
            "autocompletion": lambda: list(option.choices),
            "metavar": option.metavar or f"{'|'.join(option.choices)}|{numeric.__name__.upper()}",
        }
    flag = flag_of(option.name)
    if kind is bool:
        flag += f"/{flag_of('no_' + option.name)}"  # so that the command line can undo a file's
    if option.several:
        kind, default = list[kind], None if default is None else [default]
    return Parameter(
        option.name,
        Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[
            kind | None if option.default is None else kind, typer.Option(flag, **settings)
        ],
    )


def word_or_number(option: Option, numeric: type, text: str) -> str | int | float:
    if text in option.choices:
        return text
    try:
        return numeric(text)
    except ValueError:
        if option.check is not None:
            return text  # the configuration checks it
        raise typer.BadParameter(
            f"{text!r} is neither a number nor {' nor '.join(option.choices)}"
        ) from None


def _own_options(parameters: Mapping[str, Parameter]) -> dict[str, Option]:
    """The options among a command's own parameters, without positional arguments."""
    found = {}
    for name, parameter in parameters.items():
        if get_origin(parameter.annotation) is Annotated:
            annotation, info = get_args(parameter.annotation)
            if isinstance(info, typer.models.OptionInfo):
                (kind,) = (one for one in scalar_types(annotation) if one is not types.NoneType)
                if several := get_origin(kind) is list:
                    (kind,) = get_args(kind)
                choices = get_args(kind) if get_origin(kind) is Literal else ()
                kinds = (int, str) if info.parser else (kind if kind in KINDS else str,)
                found[name] = Option(info.help or "", name, kinds, choices=choices, several=several)
    return found


def _config_parameter(options: Mapping[str, Option]) -> Parameter:
    """The parameter `config`, parsed before all others: its file's values become their defaults."""

    def load(ctx: typer.Context, path: Path | None) -> Path | None:
        if path is not None and not ctx.resilient_parsing:
            ctx.default_map = _read_config(path, options, f"sae {ctx.info_name}")
        return path

    option = typer.Option(
        "--config",
        is_eager=True,
        callback=load,
        help=(
            'TOML file of options, each by its long name (dtype = "float32"); those on the command line win.'
        ),
    )
    return Parameter(
        "config", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option]
    )


def _read_config(path: Path, options: Mapping[str, Option], command: str) -> dict[str, Any]:
    """The options in a TOML file by name, in the form that the command line gives."""
    import tomllib

    try:
        document = tomllib.loads(regular(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"cannot read --config {path}: {error.strerror or error}; give a TOML file of options"
        ) from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # not TOML, not text, a huge number, or deeply nested lists
        raise ConfigError(
            f"cannot read --config {path}: expected TOML, lines such as d_sae = 512, got something "
            f"else: {one_line(error)}"
        ) from error
    found: dict[str, Any] = {}
    for written, value in document.items():
        name = written.replace("-", "_")
        try:
            _demand_entry(name, written, value, options, command)
            if name in found:
                raise ConfigError(
                    f"expected {name} once, got it spelt {written} as well; leave one out"
                )
        except ConfigError as error:
            raise error.within(f"cannot use {path}") from None
        one = [
            value if isinstance(value, bool) else str(value)
            for value in (value if isinstance(value, list) else [value])
        ]
        found[name] = one if options[name].several else one[0]
    return found


def _demand_entry(
    name: str, written: str, value: Any, options: Mapping[str, Option], command: str
) -> None:
    if isinstance(value, dict):
        raise ConfigError(
            f"expected lines such as d_sae = 512 outside of any table, got the table [{written}]; "
            "leave its heading out"
        )
    if name not in options:
        advice = did_you_mean(name, options) or f"`{command} --help` lists them"
        raise ConfigError(
            f"expected the long name of an option of `{command}`, got {written}; {advice}"
        )
    if not options[name].admits(value):
        question = did_you_mean(value, options[name].choices) if isinstance(value, str) else ""
        raise ConfigError(
            f"{written} must be {options[name].expected}, got {json.dumps(value, default=str)}"
            + f"; {question}" * bool(question)
        )


@contextmanager
def _naming(ctx: typer.Context, path: Path | None) -> Iterator[None]:
    """Add the file and its lines to errors about options that came from a file."""
    try:
        yield
    except ConfigError as error:
        said = {
            name: given[0] if isinstance(given, list) and len(given) == 1 else given
            for name, given in ctx.params.items()
            if name in error.options and is_given(ctx, name, "DEFAULT_MAP")
        }
        if not said:
            raise
        raise error.within(f"{path} says {' and '.join(toml_lines(said))}") from error


def is_given(ctx: Any, name: str, source: str = "") -> bool:
    """Whether the user set an option, on the command line or in a file; or by that source."""
    found = ctx.get_parameter_source(name)
    return found is not None and (found.name == source if source else found.name != "DEFAULT")


def given(ctx: typer.Context, name: str) -> Any:
    """An option's value as given by the user; None if it has its default."""
    return ctx.params[name] if is_given(ctx, name) else None


def demand_once(param: typer.CallbackParam, values: list[Any] | None) -> list[Any] | None:
    """ConfigError for an option of one value that is given several."""
    if values and len(values) > 1:
        raise ConfigError(
            f"{param.opts[0]} is given twice: expected one value; leave one of them out"
        )
    return values


def store_names(ctx: typer.Context) -> list[str]:
    """Names of stores, for shell completion; likewise below."""
    return home_of(ctx).stores.names()


def run_names(ctx: typer.Context) -> list[str]:
    return home_of(ctx).runs.names()


def home_of(ctx: typer.Context) -> Home:
    return Home(Path(ctx.find_root().params["home"]))  # there is no session during completion


def _runs(ctx: typer.Context, names: list[str] | None) -> list[str]:
    home = ctx.find_root().obj  # None during completion
    return home.runs.matching(names or []) if home else names or []


_RUN: dict[str, Any] = {
    "metavar": "RUN",
    "show_default": "the newest run",
    "autocompletion": run_names,
}
Run = Annotated[
    str | None,
    typer.Argument(
        help="Run name, folder that holds an SAE, or user/repo/folder@revision on the Hugging Face hub.",
        **_RUN,
    ),
]
Runs = Annotated[
    list[str] | None,
    typer.Argument(
        help="Run names or patterns such as 'mlp-*', folders that hold an SAE, or user/repo/folder@revision on the "
        "Hugging Face hub.",
        **_RUN,
        callback=_runs,
    ),
]
OwnRun = Annotated[
    str | None, typer.Argument(help="Compare this finished run of sae train.", **_RUN)
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="Activation store, by name or folder; for a crosscoder several, in order.",
        autocompletion=store_names,
        show_default="the one that the run was trained on, else the newest",
        callback=lambda names: names or None,
    ),
]  # without it typer gives an empty list
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Store of a transcoder's targets.",
        autocompletion=store_names,
        show_default="the one that the run was trained on",
    ),
]
SplitName = Annotated[
    Literal["test", "train", "all"],
    typer.Option("--split", help="Rows to measure on: test, held out; train, trained on; or all."),
]
SplicedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Splice the SAE into this language model, which the store's rows came from: hub id, folder or GGUF file.",
        show_default="none",
    ),
]
SplicedModels = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Splice the SAE into this language model, which the store's rows came from: hub id, folder or GGUF "
        "file; once for each model of a crosscoder.",
        show_default="none",
    ),
]
_REVISION = "Branch, tag or commit of --model on the hub."
Revision = Annotated[
    str | None,
    typer.Option(
        "--model-revision", help=_REVISION, show_default="the one that the rows came from"
    ),
]
Revisions = Annotated[
    list[str] | None,
    typer.Option(
        "--model-revision",
        help=f"{_REVISION} Of several models once, or once for each.",
        show_default="the one that the rows came from",
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        min=1,
        help="Tokens of the split to run --model on.",
        show_default="16,384; less for several SAEs",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Hub id, folder or GGUF file of the language model.",
        show_default="the one that the run's store came from",
    ),
]
Layer = Annotated[
    int | None, typer.Option("--layer", help="Read this block, from 0, if the SAE's file has none.")
]
if TYPE_CHECKING:  # a type checker cannot read a table
    SiteName = str
else:
    SiteName = Literal[SITES]
Site = Annotated[
    SiteName | None,
    typer.Option("--site", help="Read this hook point, if the SAE's file has none."),
]
Device = Annotated[
    str,
    typer.Option("--device", help="Where to compute: cpu, cuda, cuda:1; auto: cuda if available."),
]
Out = Annotated[Path, typer.Option("--out", help="Write into this folder, new or empty.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Save a picture here (PNG, PDF or SVG by its ending).")
]
Csv = Annotated[
    Path | None,
    typer.Option("--csv", dir_okay=False, help="Write the measures here, with every digit."),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on stdout, everything else on stderr."),
]


@dataclass(frozen=True)
class Session:
    """The home and the output of a command."""

    home: Home
    console: Console

    def write(self, csv: Path | None, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write a table where `--csv` says."""
        if csv is not None:
            write_csv(csv, lines)
            self.console.note(f"wrote {csv}")

    def result(self, document: dict[str, Any], *shown: Any) -> None:
        """Print the document's notes, and then the result."""
        for note in document["notes"]:
            self.console.note(note)
        self.console.result(document, *shown)


def start(
    ctx: typer.Context,
    as_json: bool,
    plot: Path | None = None,
    csv: Path | None = None,
    out: Path | None = None,
    checks_use: bool = True,
) -> Session:
    """Begin a command, after its imports: from now on Ctrl-C is a KeyboardInterrupt. ConfigError if a path cannot be
    written; unless `checks_use`, the command itself refuses a folder in use."""
    interrupts.begin()
    if plot is not None:
        from ..show.style import check_suffix  # matplotlib takes a second to import

        check_suffix(plot)
    if out is not None and checks_use and not is_free(out):
        raise ConfigError(
            f"cannot write to {out}: expected an empty or a new folder, got one in use; name another"
        )
    for path in (plot, csv, out):
        if path is not None:
            try:
                there = next(
                    folder for folder in (path, *path.absolute().parents) if folder.is_dir()
                )
                check_place(there / "index.html" if path is out else path)
            except OSError as error:
                raise ConfigError(
                    f"cannot write {path}: {error.strerror or error}; name another path"
                ) from error
    return Session(ctx.find_root().obj, Console(as_json))
