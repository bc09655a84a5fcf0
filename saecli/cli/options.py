"""Options as Typer parameters and in the file of `--config`; those that commands share; a command's start."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from inspect import Parameter
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.console import Console
from ..base.errors import ConfigError, one_line
from ..base.files import demand_place, expanded, is_free, partial_path
from ..base.home import Home
from ..base.options import REQUIRED, Config, Option, arguments_of, options_of
from ..base.words import did_you_mean, flag_of

WIDEST_METAVAR = 16  # more leave no room for the help in 80 columns


@dataclass(frozen=True)
class Given:
    """Options that the user set: one of the combinations of their values."""

    values: Mapping[str, Any]
    varied: Mapping[str, Any]  # of options set to several values


def configured(
    *declared: type[Config] | Callable[..., Any],
    repeated: bool = False,
    more: Iterable[Option] = (),
    **tables: Mapping[str, type[Config]],
) -> Callable:
    """Decorate a command with options of configurations, of public functions, of tables of configurations by the option
    that selects an entry, and `--config` and `--help-all`. Its parameter `options` receives those that the user set, by
    field or argument; if `repeated`, a tuple of `Given`."""
    all_options = [
        replace(option, panel=option.panel or getattr(source, "panel", Config.panel))
        for source in declared
        for option in _declared_by(source)
    ]
    for selector, table in tables.items():
        all_options += _merged(table, f"Options of --{selector}")
    all_options += more
    options = {option.name: option for option in all_options}

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def command(
            ctx: typer.Context, config: Path | None, help_all: bool = False, **arguments: Any
        ) -> None:
            own = {name: value for name, value in arguments.items() if name not in options}
            try:
                values = _set_by_user(ctx, options)
                function(ctx=ctx, options=_combinations(values) if repeated else values, **own)
            except ConfigError as error:
                raise error.within(f"with --config {config}") if config else error from None

        parameters_of_command = inspect.signature(function, eval_str=True).parameters.values()
        first = [option for option in options.values() if option.panel == Config.panel]
        parameters = [
            *(_parameter(option, repeated) for option in first),
            *(parameter for parameter in parameters_of_command if parameter.name != "options"),
            CONFIG,
            *([HELP_ALL] if any(option.advanced for option in options.values()) else []),
            *(_parameter(option, repeated) for option in options.values() if option not in first),
        ]
        # Typer reads the parameters of a command from its signature.
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
        )
        return command

    return decorate


def _declared_by(source: Any) -> Iterable[Option]:
    of_source = options_of(source) if isinstance(source, type) else arguments_of(source)
    return of_source.values()


def _merged(table: Mapping[str, type[Config]], panel: str) -> list[Option]:
    """The options of a table's configurations; the help lists the entries that take one if not all do."""
    takers: dict[str, list[str]] = {}
    options: dict[str, Option] = {}
    for key, config in table.items():
        for name, option in options_of(config).items():
            takers.setdefault(name, []).append(key)
            options[name] = replace(option, panel=option.panel or panel)
    return [
        option
        if len(takers[name]) == len(table)
        else replace(option, help=f"{option.help} ({', '.join(takers[name])})")
        for name, option in options.items()
    ]


def _keyword(name: str, kind: Any, info: Any, default: Any = None) -> Parameter:
    annotation: Any = Annotated[kind | None if default is None else kind, info]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameter(option: Option, repeated: bool) -> Parameter:
    settings: dict[str, Any] = {
        "help": option.help,
        "rich_help_panel": option.panel,
        "hidden": option.advanced,
    }
    flag, default = flag_of(option.name), option.default
    if bool in option.types:
        flags = f"{flag}/{flag_of('no_' + option.name)}"  # the command line can undo a file's
        return _keyword(
            option.name, bool, typer.Option(flags, show_default=default, **settings), default
        )
    several = option.several or (repeated and option.repeatable)
    types = [kind.__name__ for kind in option.types if kind is not str or not option.choices]
    values = [*option.choices, *types]
    metavar = option.metavar or f"<{'|'.join(values)}>"
    if len(metavar) > WIDEST_METAVAR and not option.metavar:
        metavar = "<choice>"
        if any(value not in option.help for value in values):
            settings["help"] += f" One of {', '.join(values)}."
    if default not in (None, REQUIRED):
        words = [str(value) for value in (default if isinstance(default, tuple) else [default])]
        default = words if several else words[0]
    info = typer.Option(
        flag,
        metavar=f"{metavar}..." if several and not option.once else metavar,
        autocompletion=lambda: option.choices,
        show_default=option.default_words or True,
        **settings,
    )
    return _keyword(option.name, list[str] if several else str, info, default)


def _set_by_user(ctx: typer.Context, options: Mapping[str, Option]) -> dict[str, Any]:
    given = [option for option in options.values() if is_given(ctx, option.name)]
    return {option.argument: _typed(option, ctx.params[option.name]) for option in given}


def _typed(option: Option, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return option.parsed(value)
    values = [option.parsed(text) for text in value]
    return tuple(values) if option.several else values


def _combinations(options: Mapping[str, Any]) -> tuple[Given, ...]:
    several = {name: values for name, values in options.items() if isinstance(values, list)}
    for name, values in several.items():
        twice = [value for index, value in enumerate(values) if value in values[:index]]
        if twice:
            raise ConfigError(
                f"{flag_of(name)} {twice[0]} is given twice; give each value once, for one SAE per value"
            )
    combinations = []
    for combination in product(*several.values()):
        chosen = dict(zip(several, combination, strict=True))
        varied = {name: value for name, value in chosen.items() if len(several[name]) > 1}
        combinations.append(Given({**options, **chosen}, varied))
    return tuple(combinations)


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.command.epilog = None
        for param in ctx.command.params:
            param.hidden = False  # type: ignore[attr-defined]  # of every parameter of Typer's
        print(ctx.get_help(), end="")
        raise typer.Exit


HELP_ALL = _keyword(
    "help_all",
    bool,
    typer.Option(
        "--help-all",
        help="Show all options, and exit.",
        is_eager=True,
        expose_value=False,
        callback=_show_all,
    ),
    default=False,
)


def _load_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make a file's values the defaults of the other parameters, which are parsed later."""
    if path is not None and not ctx.resilient_parsing:
        ctx.default_map = _read_config(ctx, path)
    return path


CONFIG = _keyword(
    "config",
    Path,
    typer.Option(
        "--config",
        is_eager=True,
        callback=_load_config,
        help='TOML file of options, each by its long name (dtype = "float32"); those on the command line win.',
    ),
)


def _read_config(ctx: typer.Context, path: Path) -> dict[str, Any]:
    """Typer and the configurations check the values."""
    import tomllib

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"cannot read --config {path}: {one_line(error)}; expected TOML, lines such as d_sae = 512"
        ) from error
    params = {param.name: param for param in ctx.command.params if not param.is_eager}
    options: dict[str, Any] = {}
    for name, value in document.items():
        if name not in params:
            advice = did_you_mean(name, params) or "see `--help-all`"
            raise ConfigError(
                f"cannot use {path}: expected the long name of an option of `sae {ctx.info_name}`, got {name}; {advice}"
            )
        if value == []:
            raise ConfigError(f"cannot use {path}: {name} takes one value or more, got none")
        one_of_several = params[name].multiple and not isinstance(value, list)
        options[name] = [value] if one_of_several else value
    return options


def is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


SEVERAL = "several"  # in `Context.meta`: whether several runs or a pattern were given


def _chosen_runs(ctx: typer.Context, runs: str | list[str] | None) -> str | list[str] | None:
    """The runs that are named, or match patterns; RunError if there is none, before anything slow is imported."""
    home = ctx.find_root().obj  # None during completion
    if home and not runs and not ctx.params.get("demo"):  # of `sae serve`, which needs none
        home.runs.find(None)
    if not home or not runs:
        return runs
    names = home.runs.matching([runs] if isinstance(runs, str) else runs)
    if isinstance(runs, str):
        if len(names) > 1:
            raise ConfigError(
                f"sae {ctx.info_name} takes one run, got {runs!r}, which {len(names):,} runs match, "
                f"{names[0]} and others; name one of them, and call it once for each"
            )
        return names[0]
    ctx.meta[SEVERAL] = len(runs) > 1 or names != runs
    return names


_RUN: dict[str, Any] = {
    "metavar": "RUN",
    "show_default": "the newest run",
    "callback": _chosen_runs,
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
    ),
]
FinishedRun = Annotated[
    str | None, typer.Argument(help="Compare this finished run of sae train.", **_RUN)
]
NoModel = Annotated[
    bool, typer.Option("--no-model", help="Leave out what needs the language model.")
]
PATH: dict[str, Any] = {"parser": expanded, "metavar": "<path>"}
Plot = Annotated[
    Path | None, typer.Option(help="Save a picture here (PNG, PDF or SVG by its ending).", **PATH)
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on stdout, everything else on stderr."),
]


def model_or_own(model: Any, no_model: bool) -> Any:
    """The model named, else whether to take that of the run's store."""
    if model and no_model:
        raise ConfigError("cannot use both --model and --no-model; leave one of them out")
    return model or not no_model


@dataclass(frozen=True)
class Session:
    home: Home
    console: Console
    options: Mapping[str, Any]
    given: Set[str]  # names of the options that the user set

    def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        return function(**arguments, home=self.home, progress=self.console)

    def print_result_and_notes(self, document: dict[str, Any], *shown: Any) -> None:
        for note in document["notes"]:
            self.console.note(note)
        self.console.print_result(document, *shown)


def start(ctx: typer.Context, new: Path | None = None) -> Session:
    """ConfigError if `--plot` or `--html` cannot be written, or the folder `new` holds something."""
    plot, html = (ctx.params.get(name) for name in ("plot", "html"))
    if plot is not None:
        from ..show.style import check_suffix  # matplotlib takes a second to import

        check_suffix(Path(plot))
    if new is not None:
        if not is_free(new):
            raise ConfigError(
                f"cannot write to {new}: expected an empty or a new folder, got one in use; name another"
            )
        folders = [*reversed(new.absolute().parents), new]
        missing = [folder for folder in folders if not folder.exists()]
        demand_place(missing[0] if missing else partial_path(new))
    for path in (plot, html):
        if path is not None:
            demand_place(Path(path))
    given = {name for name in ctx.params if is_given(ctx, name)}
    # Typer's value of a list that is not given is ().
    options = {name: None if value == () else value for name, value in ctx.params.items()}
    return Session(ctx.find_root().obj, Console(ctx.params["json"]), options, given)
