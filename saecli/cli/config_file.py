"""`--config run.toml`: options from a TOML file, checked like those of the command line.

    solver = "pam-sgd"
    d_sae = 512          # the long option's name; d-sae works too
    revive = false
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.errors import ConfigError, did_you_mean, one_line
from ..base.files import regular
from ..base.options import Option, toml_lines
from ..base.other_names import in_place_of

HELP = 'TOML file of options, each by its long name (dtype = "float32"); those on the command line win.'


def config_parameter(options: Mapping[str, Option]) -> Parameter:
    """The parameter `config`, parsed before all others: its file's values become their defaults."""

    def load(ctx: typer.Context, path: Path | None) -> Path | None:
        if path is not None and not ctx.resilient_parsing:
            found = read_config(path, options, f"sae {ctx.info_name}")
            ctx.default_map = {name: [value] if options[name].several and not isinstance(value, list) else value
                               for name, value in found.items()}
        return path

    option = typer.Option("--config", help=HELP, is_eager=True, callback=load)
    return Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option])


def read_config(path: Path, options: Mapping[str, Option], command: str) -> dict[str, Any]:
    """The options in a TOML file by name, in the form that the command line gives; ConfigError if it cannot be read, or
    has an entry or a value that the command does not take."""
    import tomllib

    try:
        document = tomllib.loads(regular(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror or error}; give a TOML file of "
                          "options") from error
    except (ValueError, RecursionError) as error:  # not TOML, not text, a huge number, or deeply nested lists
        raise ConfigError(f"cannot read --config {path}: expected TOML, lines such as d_sae = 512, got something "
                          f"else: {one_line(error)}") from error
    found: dict[str, Any] = {}
    for written, value in document.items():
        name = written.replace("-", "_")
        try:
            _look_at(name, written, value, options, command)
        except ConfigError as error:
            raise error.within(f"cannot use {path}") from None
        if name in found:
            raise ConfigError(f"cannot use {path}: expected {name} once, got it spelt {written} as well; leave one "
                              "out")
        found[name] = _typed(value)
    return found


def _look_at(name: str, written: str, value: Any, options: Mapping[str, Option], command: str) -> None:
    if isinstance(value, dict):
        raise ConfigError(f"expected lines such as d_sae = 512 outside of any table, got the table [{written}]; "
                          "leave its heading out")
    if name not in options:
        advice = in_place_of(name, options) or did_you_mean(name, options) or f"`{command} --help` lists them"
        raise ConfigError(f"expected the long name of an option of `{command}`, got {written}; {advice}")
    if not options[name].admits(value):
        question = did_you_mean(value, options[name].choices) if isinstance(value, str) else ""
        raise ConfigError(f"{written} must be {options[name].expected}, got {json.dumps(value, default=str)}"
                          + f"; {question}" * bool(question))


def _typed(value: Any) -> Any:
    if isinstance(value, list):
        return [str(one) for one in value]
    return value if isinstance(value, bool) else str(value)


@contextmanager
def naming(ctx: typer.Context, path: Path | None) -> Iterator[None]:
    """Add the file and its lines to errors about options that came from a file."""
    try:
        yield
    except ConfigError as error:
        said = [line for name, given in ctx.params.items() if name in error.options and name in (ctx.default_map or ())
                and getattr(ctx.get_parameter_source(name), "name", "") == "DEFAULT_MAP"
                for line in toml_lines({name: _alone(given)})]
        if not said:
            raise
        raise error.within(f"{path} says {' and '.join(said)}") from error


def _alone(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value
