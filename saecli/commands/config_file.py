"""`--config run.toml`: options from a TOML file, checked as those of the command line are, and a run's own such file.

    solver = "pam-sgd"
    d_sae = 512          # the long option's name; d-sae does too
    revive = false

TOML writes words, numbers and lists as JSON does, so that the standard library both reads and writes it.
"""

import enum
import json
import re
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from ..config import Option, flag_of, scalar_types
from ..errors import ConfigError, did_you_mean, one_line
from ..files import appearing_whole, regular

CONFIG = "config.toml"  # in a run's folder, what trains that run again
HELP = 'TOML file of options, each by its long name (dtype = "float32"); those on the command line win.'
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}


@dataclass(frozen=True)
class Key:
    """An option that may stand in a file, under the name of its parameter.

    Args:
        kinds: the types that it takes, of `KINDS`.
        choices: the words that it takes; empty for any.
        several: whether it may be given several times, in the file as a list.
    """

    kinds: tuple[type, ...]
    choices: tuple[str, ...] = ()
    several: bool = False

    @classmethod
    def of_field(cls, annotation: Any, rule: Option, several: bool) -> "Key":
        """That of a configuration's field."""
        kinds = tuple(kind for kind in scalar_types(annotation) if kind is not types.NoneType)
        return cls(kinds, () if rule.check else rule.choices, several)

    @classmethod
    def of_parameter(cls, parameter: Parameter) -> "Key | None":
        """That of a command's own parameter; None where it is no option."""
        if get_origin(parameter.annotation) is not Annotated:
            return None
        annotation, info = get_args(parameter.annotation)
        if not isinstance(info, typer.models.OptionInfo):
            return None
        (kind,) = (kind for kind in scalar_types(annotation) if kind is not types.NoneType)
        several = get_origin(kind) is list
        if several:
            (kind,) = get_args(kind)
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        if isinstance(kind, enum.EnumType):
            choices = tuple(member.value for member in kind)
        return cls((kind,) if kind in KINDS else (str,), choices, several)

    def admits(self, value: Any) -> bool:
        """Whether a value of a TOML file is one that the option takes."""
        if isinstance(value, list):
            return self.several and bool(value) and not any(isinstance(one, list) or not self.admits(one)
                                                            for one in value)
        if type(value) is str:  # a command line cannot hold what would end a file's name early either
            return str in self.kinds and (not self.choices or value in self.choices) and "\0" not in value
        return type(value) in self.kinds or (type(value) is int and float in self.kinds)

    @property
    def expected(self) -> str:
        """What it takes, in words."""
        words = [f"one of {', '.join(self.choices)}" if kind is str and self.choices else KINDS[kind]
                 for kind in self.kinds]
        return " or ".join(words) + ", or a list of such" * self.several


def config_parameter(keys: Mapping[str, Key]) -> Parameter:
    """The parameter `config` of a command that takes these options, by their names.

    It is handled before all others, and its file's values then stand in for their defaults.
    """

    def load(ctx: typer.Context, path: Path | None) -> Path | None:
        if path is not None and not ctx.resilient_parsing:
            found = read_config(path, keys, f"sae {ctx.info_name}")
            ctx.default_map = {name: [value] if keys[name].several and not isinstance(value, list) else value
                               for name, value in found.items()}
        return path

    option = typer.Option("--config", help=HELP, is_eager=True, callback=load)
    return Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option])


def read_config(path: Path, keys: Mapping[str, Key], command: str) -> dict[str, Any]:
    """The options of a TOML file by name, each as it would be typed.

    Args:
        path: the file.
        keys: the options that the command takes, by name.
        command: what it is called in messages.

    Raises:
        ConfigError: the file cannot be read, or holds something that the command does not take.
    """
    try:
        document = tomllib.loads(regular(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror or error}; give a TOML file of "
                          "options") from error
    except (ValueError, RecursionError) as error:  # no TOML, no text, a number of thousands of digits, lists in lists
        raise ConfigError(f"cannot read --config {path}: expected TOML, lines such as d_sae = 512, got something else: "
                          f"{one_line(error)}") from error
    found: dict[str, Any] = {}
    for written, value in document.items():
        name = written.replace("-", "_")
        if isinstance(value, dict):
            raise ConfigError(f"cannot use {path}: expected lines such as d_sae = 512 outside of any table, got the "
                              f"table [{written}]; leave its heading out")
        if name not in keys:
            advice = did_you_mean(name, keys) or f"`{command} --help` lists them"
            raise ConfigError(f"cannot use {path}: expected the long name of an option of `{command}`, got {written}; "
                              f"{advice}")
        if name in found:
            raise ConfigError(f"cannot use {path}: expected {name} once, got it spelt {written} as well; leave one out")
        if not keys[name].admits(value):
            question = did_you_mean(value, keys[name].choices) if isinstance(value, str) else ""
            raise ConfigError(f"cannot use {path}: {written} must be {keys[name].expected}, "
                              f"got {json.dumps(value, default=str)}" + f"; {question}" * bool(question))
        found[name] = _typed(value)
    return found


def _typed(value: Any) -> Any:
    """A value as the command line would have it: a flag's truth, words otherwise."""
    if isinstance(value, list):
        return [str(one) for one in value]
    return value if isinstance(value, bool) else str(value)


@contextmanager
def naming(ctx: typer.Context, path: Path | None) -> Iterator[None]:
    """Have a message about options that came from a file name the file, and what it says."""
    try:
        yield
    except ConfigError as error:
        said = [line for name in ctx.default_map or () for line in _lines({name: _alone(ctx.params[name])})
                if ctx.get_parameter_source(name).name == "DEFAULT_MAP"
                and re.search(rf"{flag_of(name)}(?![\w-])", str(error))]
        if not said:
            raise
        raise ConfigError(f"{path} says {' and '.join(said)}: {error}") from error


def _alone(value: Any) -> Any:
    """The only value of a list that has one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def write_config(path: Path, heading: Iterable[str], values: Mapping[str, Any], filled: Mapping[str, Any]) -> None:
    """Write a file that `read_config` reads; it appears whole or not at all.

    Args:
        path: the file.
        heading: comments that it begins with.
        values: options by key.
        filled: the others, as they were filled in, which stand below as comments; those that are None are left out.
    """
    lines = [*(f"# {line}" for line in heading), "", *_lines(values), "", "# Not given, and so by default:",
             *(f"# {line}" for line in _lines(filled))]
    with appearing_whole(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items() if value is not None]
