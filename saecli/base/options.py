"""Options, each declared once by `option(...)` as a field of a `Config`: for Python, TOML files, the command line and
help pages."""

import dataclasses
import functools
import json
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

from .errors import ConfigError, did_you_mean, flag_of, unknown_choice

# JSON readers with only doubles round whole numbers above 2^53; other numbers must fit float32.
LARGEST = {int: 2**53, float: 1e30}
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}
PAPER: dict[str, Any] = {
    "panel": "The paper's experiments",
    "advanced": True,
}  # for options that only these need


@dataclass(frozen=True)
class Option:
    help: str
    name: str = ""
    kinds: tuple[type, ...] = ()  # of `KINDS`
    optional: bool = False  # can be None, for a default that depends on something else
    default: Any = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()  # the words allowed, with numbers or without
    check: Callable[[str], None] | None = (
        None  # instead of `choices`; its ValueError describes valid words
    )
    metavar: str | None = None
    panel: str | None = None  # of the help page; None for its configuration's
    advanced: bool = False  # shown by `--help-all` only
    once: bool = (
        False  # not repeatable, where other numbers may be repeated for one result per value
    )
    several: bool = False  # may be given several times, in a file as a list; if `once`, the values make one tuple

    @property
    def repeatable(self) -> bool:
        return not self.once and not {int, float}.isdisjoint(self.kinds)

    @property
    def expected(self) -> str:
        words = [
            f"one of {', '.join(self.choices)}"
            if kind is str and self.choices and not self.check
            else KINDS[kind]
            for kind in self.kinds
        ]
        return " or ".join(words) + ", or a list of such" * self.several

    def admits(self, value: Any) -> bool:
        """Whether a value has an allowed type and is among the allowed words."""
        if isinstance(value, list):
            return (
                self.several
                and bool(value)
                and not any(isinstance(one, list) or not self.admits(one) for one in value)
            )
        if type(value) is str:  # a NUL would end a file's name, and cannot come from a command line
            known = not self.choices or self.check is not None or value in self.choices
            return str in self.kinds and known and "\0" not in value
        return type(value) in self.kinds or (type(value) is int and float in self.kinds)

    def checked(self, value: Any) -> Any:
        """The value, converted to the option's type; ConfigError if it is not allowed."""
        if value is None and self.optional:
            return None
        if self.several:
            one = replace(self, several=False, optional=False)
            return tuple(map(one.checked, value if isinstance(value, list | tuple) else [value]))
        if type(value) in LARGEST and not abs(value) <= LARGEST[type(value)]:
            raise ConfigError(
                f"{flag_of(self.name)} must be a number of ordinary size, got {value!s:.40}"
            )
        if type(value) is str and str in self.kinds and not self.admits(value) and self.choices:
            raise unknown_choice(self.name, value, self.choices)
        if not self.admits(value):
            raise ConfigError(f"{flag_of(self.name)} must be {self.expected}, got {value!r}")
        try:
            if isinstance(value, str) and self.check is not None:
                self.check(value)
        except ValueError as error:
            raise ConfigError(f"{flag_of(self.name)} must be {error}, got {value!r}") from None
        if isinstance(value, int | float) and not isinstance(value, bool):
            for words, bound, holds in (
                ("at least", self.minimum, operator.ge),
                ("above", self.above, operator.gt),
                ("at most", self.maximum, operator.le),
                ("below", self.below, operator.lt),
            ):
                if bound is not None and not holds(value, bound):
                    raise ConfigError(
                        f"{flag_of(self.name)} must be {words} {bound:g}, got {value:g}"
                    )
        return float(value) if type(value) is int and int not in self.kinds else value


def option(default: Any, help: str, **rules: Any) -> Any:
    """Declare a field; `rules` are further fields of `Option`."""
    return field(default=default, metadata={"option": Option(help, **rules)})


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Values as words of a command line."""
    return [
        word
        for name, value in values.items()
        if value not in (None, False)
        for one in (value if isinstance(value, list) else [value])
        for word in (flag_of(name), *([] if one is True else [str(one)]))
    ]


def scalar_types(annotation: Any) -> tuple[type, ...]:
    """The types in an annotation: `(int, str, NoneType)` for `int | str | None`."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return typing.get_args(annotation)
    return (annotation,)


@dataclass(frozen=True)
class Config:
    panel: ClassVar[str] = "Options"

    def __post_init__(self) -> None:
        for name, one in options_of(type(self)).items():
            object.__setattr__(self, name, one.checked(getattr(self, name)))

    @classmethod
    def among(cls, options: Mapping[str, Any]) -> Self:
        """The configuration of those of some options that it has."""
        return cls(**{name: options[name] for name in options_of(cls) if name in options})

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The configuration that `to_json` wrote; missing fields take their defaults, unexpected ones are refused."""
        if unexpected := sorted(document.keys() - options_of(cls).keys()):
            raise ConfigError(f"{cls.__name__} does not match: unexpected {unexpected}")
        return cls(**document)


def options_of(config: type[Config]) -> dict[str, Option]:
    """The options that the fields of a configuration class declare, by name."""
    found: Any = config
    return _options_of(found)


@functools.cache
def _options_of(config: Any) -> dict[str, Option]:
    hints = typing.get_type_hints(config)
    found = {}
    for one in dataclasses.fields(config):
        kinds, made = scalar_types(hints[one.name]), one.metadata["option"]
        items = tuple(
            typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is tuple
        )
        found[one.name] = replace(
            made,
            name=one.name,
            default=one.default,
            several=bool(items),
            kinds=items or tuple(kind for kind in kinds if kind is not types.NoneType),
            optional=types.NoneType in kinds,
            once=made.once or bool(items),
        )
    return found


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """Values as lines of TOML; None is left out."""
    return [
        f"{key} = {json.dumps(value, ensure_ascii=False)}"
        for key, value in values.items()
        if value is not None
    ]


ConfigT = TypeVar("ConfigT", bound=Config)


def choose(
    table: Mapping[str, type[ConfigT]], selector: str, name: str, given: Mapping[str, Any]
) -> ConfigT:
    """Build `table[name]`, which the option `selector` names, from the options `given` by the user; refuses those
    that only other entries have."""
    if name not in table:
        raise unknown_choice(selector, name, table)
    names = {key: options_of(config).keys() for key, config in table.items()}
    for foreign in sorted(given.keys() & set().union(*names.values()) - names[name]):
        takers = " or ".join(key for key in table if foreign in names[key])
        raise ConfigError(
            f"{flag_of(foreign)} does nothing with {flag_of(selector)} {name}; leave it out, or use "
            f"{flag_of(selector)} {takers}"
        )
    return table[name].among(given)


def demand_known(function: str, given: Iterable[str], known: Collection[str], command: str) -> None:
    """Raise a ConfigError, with advice, for an option that a function lacks; `command` has the same ones."""
    for name in given:
        if name not in known:
            advice = did_you_mean(name, known) or f"expected one of `sae {command}`'s"
            raise ConfigError(f"{function} has no option {name}; {advice}")
