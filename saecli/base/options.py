"""Options, each declared once, and configurations made of them.

A configuration subclasses `Config` and declares each field with `option(...)`. The resulting `Option` serves Python,
TOML files, the command line and help pages.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

from .errors import ConfigError, flag_of, unknown_choice

# JSON readers with only doubles round whole numbers above 2^53; other numbers must fit float32.
LARGEST = {int: 2**53, float: 1e30}
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}
PAPER: dict[str, Any] = {"panel": "The paper's experiments", "advanced": True}  # for options that only these need


@dataclass(frozen=True)
class Option:
    """One option.

    Args:
        kinds: its types, out of `KINDS`.
        optional: whether it can be None, for a default that depends on something else.
        minimum, above, maximum, below: inclusive and exclusive bounds.
        choices: the words allowed, with numbers or without.
        check: validates a word instead of `choices`; raises ValueError with a description of valid words.
        panel: its panel of the help page; None for its configuration's.
        advanced: shown by `--help-all` only.
        once: not repeatable, where other numbers may be repeated for one result per value.
        several: may be given several times, in a file as a list.
    """

    help: str
    name: str = ""
    kinds: tuple[type, ...] = ()
    optional: bool = False
    default: Any = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    check: Callable[[str], None] | None = None
    metavar: str | None = None
    panel: str | None = None
    advanced: bool = False
    once: bool = False
    several: bool = False

    @property
    def repeatable(self) -> bool:
        """Whether it is a number that can be repeated, for one result per value."""
        return not self.once and not {int, float}.isdisjoint(self.kinds)

    @property
    def expected(self) -> str:
        """Its type or choices, in words."""
        words = [f"one of {', '.join(self.choices)}" if kind is str and self.choices and not self.check else KINDS[kind]
                 for kind in self.kinds]
        return " or ".join(words) + ", or a list of such" * self.several

    def admits(self, value: Any) -> bool:
        """Whether a value has an allowed type and is among the allowed words."""
        if isinstance(value, list):
            return self.several and bool(value) and not any(isinstance(one, list) or not self.admits(one)
                                                            for one in value)
        if type(value) is str:  # a NUL would end a file's name, and cannot come from a command line
            known = not self.choices or self.check is not None or value in self.choices
            return str in self.kinds and known and "\0" not in value
        return type(value) in self.kinds or (type(value) is int and float in self.kinds)

    def checked(self, value: Any) -> Any:
        """The value, converted to the option's type; ConfigError if it is not allowed."""
        if value is None and self.optional:
            return None
        if type(value) in LARGEST and not abs(value) <= LARGEST[type(value)]:
            raise ConfigError(f"{flag_of(self.name)} must be a number of ordinary size, got {value!s:.40}",
                              option=self.name)
        if type(value) is str and str in self.kinds and not self.admits(value) and self.choices:
            raise unknown_choice(self.name, value, self.choices)
        if not self.admits(value):
            raise ConfigError(f"{flag_of(self.name)} must be {self.expected}, got {value!r}", option=self.name)
        if isinstance(value, str):
            self._look_at(value)
        elif not isinstance(value, bool):
            self._bound(value)
        return float(value) if type(value) is int and int not in self.kinds else value

    def _look_at(self, word: str) -> None:
        try:
            if self.check is not None:
                self.check(word)
        except ValueError as error:
            raise ConfigError(f"{flag_of(self.name)} must be {error}, got {word!r}", option=self.name) from None

    def _bound(self, number: float) -> None:
        for bound, words, holds in ((self.minimum, "at least", self.minimum is None or number >= self.minimum),
                                    (self.above, "above", self.above is None or number > self.above),
                                    (self.maximum, "at most", self.maximum is None or number <= self.maximum),
                                    (self.below, "below", self.below is None or number < self.below)):
            if not holds:
                raise ConfigError(f"{flag_of(self.name)} must be {words} {bound:g}, got {number:g}", option=self.name)


def option(default: Any, help: str, **rules: Any) -> Any:
    """Declare a configuration field; `rules` are further fields of `Option`."""
    return field(default=default, metadata={"option": Option(help, **rules)})


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Values as words of a command line; a flag's without a value."""
    return [word for name, value in values.items() if value not in (None, False)
            for word in (flag_of(name), *([] if value is True else [str(value)]))]


def scalar_types(annotation: Any) -> tuple[type, ...]:
    """The types in an annotation: `(int, str, NoneType)` for `int | str | None`."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return typing.get_args(annotation)
    return (annotation,)


@dataclass(frozen=True)
class Config:
    """Base of every configuration."""

    panel: ClassVar[str] = "Options"

    def __post_init__(self) -> None:
        for name, one in options_of(type(self)).items():
            object.__setattr__(self, name, one.checked(getattr(self, name)))

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
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
        kinds = scalar_types(hints[one.name])
        found[one.name] = replace(one.metadata["option"], name=one.name, default=one.default,
                                  kinds=tuple(kind for kind in kinds if kind is not types.NoneType),
                                  optional=types.NoneType in kinds)
    return found


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """Values as lines of TOML; None is left out."""
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items() if value is not None]


ConfigT = TypeVar("ConfigT", bound=Config)


def choose(table: Mapping[str, type[ConfigT]], selector: str, name: str,
           values: Mapping[str, Any], given: Set[str]) -> ConfigT:
    """Build `table[name]` from the options given, refusing those that only other entries have.

    Args:
        selector: option that selects from the table, e.g. "solver".
        values: value by option name, for the options of all entries.
        given: the options that the user set, as opposed to left at their defaults.
    """
    if name not in table:
        raise unknown_choice(selector, name, table)
    names = {key: options_of(config).keys() for key, config in table.items()}
    for foreign in sorted(given & set().union(*names.values()) - names[name]):
        takers = " or ".join(key for key in table if foreign in names[key])
        raise ConfigError(f"{flag_of(foreign)} does nothing with {flag_of(selector)} {name}; leave it out, or use "
                          f"{flag_of(selector)} {takers}", option=foreign)
    return table[name](**{key: values[key] for key in names[name] & given})
