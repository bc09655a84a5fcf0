"""Options, each declared once, and configurations made of them.

A configuration subclasses `Config` and declares each field with `option(...)`, beside the code that it configures. The
`Option` that this makes is all that anyone knows of it: `Config.__post_init__` checks values by it, `options/` makes a
Typer parameter of it and checks the values of a TOML file by it, and help pages show it.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from .errors import ConfigError, unknown_choice

# Whole numbers above 2^53 are lost in JSON readers that know only doubles; other numbers are to fit float32.
LARGEST = {int: 2**53, float: 1e30}
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}
PAPER: dict[str, Any] = {"panel": "The paper's experiments", "advanced": True}  # for what nothing else needs


@dataclass(frozen=True)
class Option:
    """One option: what it takes, and what is said of it.

    Args:
        help: one sentence for the help page, with the unit where there is one.
        name: what Python calls it, such as d_sae.
        kinds: the types that it takes, of `KINDS`.
        optional: whether it can be None, which stands for a default that depends on something else.
        default: its value where none is given.
        minimum: smallest value allowed.
        above: value that must be exceeded.
        maximum: largest value allowed.
        below: value that must not be reached.
        choices: the words allowed; where numbers are too, the words allowed beside them.
        check: looks at a word in place of `choices`; raises ValueError with what the word must be.
        metavar: how the help page writes the value.
        panel: the part of the help page that it stands in; None for its configuration's.
        advanced: whether it is left out of `--help`, and shown by `--help-all` alone.
        once: whether it takes one value where other numbers may be repeated, for one result a value.
        several: whether it may be given several times, in a file as a list.
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
        """Whether it is one of the numbers that can be repeated, for one result a value."""
        return not self.once and not {int, float}.isdisjoint(self.kinds)

    @property
    def expected(self) -> str:
        """What it takes, in words."""
        words = [f"one of {', '.join(self.choices)}" if kind is str and self.choices and not self.check else KINDS[kind]
                 for kind in self.kinds]
        return " or ".join(words) + ", or a list of such" * self.several

    def admits(self, value: Any) -> bool:
        """Whether a value of a TOML file, or one of Python's, is of a type and among the words that it takes."""
        if isinstance(value, list):
            return self.several and bool(value) and not any(isinstance(one, list) or not self.admits(one)
                                                            for one in value)
        if type(value) is str:  # a command line cannot hold what would end a file's name early either
            known = not self.choices or self.check is not None or value in self.choices
            return str in self.kinds and known and "\0" not in value
        return type(value) in self.kinds or (type(value) is int and float in self.kinds)

    def checked(self, value: Any) -> Any:
        """The value, of the type that it takes; ConfigError where it is none that is allowed."""
        if value is None and self.optional:
            return None
        if type(value) in LARGEST and not abs(value) <= LARGEST[type(value)]:
            raise ConfigError(self.name, "must be a number of ordinary size, got {got}", got=f"{value!s:.40}")
        if type(value) is str and str in self.kinds and not self.admits(value) and self.choices:
            raise unknown_choice(self.name, value, self.choices)
        if not self.admits(value):
            raise ConfigError(self.name, "must be {expected}, got {got}", expected=self.expected, got=repr(value))
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
            raise ConfigError(self.name, "must be {wanted}, got {got}", wanted=error, got=repr(word)) from None

    def _bound(self, number: float) -> None:
        for bound, words, holds in ((self.minimum, "at least", self.minimum is None or number >= self.minimum),
                                    (self.above, "above", self.above is None or number > self.above),
                                    (self.maximum, "at most", self.maximum is None or number <= self.maximum),
                                    (self.below, "below", self.below is None or number < self.below)):
            if not holds:
                raise ConfigError(self.name, "must be {words} {bound}, got {got}", words=words, bound=f"{bound:g}",
                                  got=f"{number:g}")


def option(default: Any, help: str, **rules: Any) -> Any:
    """Declare a configuration field.

    Args:
        default: value when none is given.
        help: one sentence for the help page.
        **rules: the further fields of `Option`; name, types and default are those of the dataclass field.

    Returns:
        A dataclass field that carries its `Option`.
    """
    return field(default=default, metadata={"option": Option(help, **rules)})


def flag_of(name: str) -> str:
    """The command-line spelling of an option: `d_sae` is `--d-sae`."""
    return "--" + name.replace("_", "-")


def scalar_types(annotation: Any) -> tuple[type, ...]:
    """The plain types that an annotation admits: `int | str | None` gives `(int, str, NoneType)`."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return typing.get_args(annotation)
    return (annotation,)


@dataclass(frozen=True)
class Config:
    """Base of every configuration; see the module's docstring."""

    panel: ClassVar[str] = "Options"

    def __post_init__(self) -> None:
        for name, one in options_of(type(self)).items():
            object.__setattr__(self, name, one.checked(getattr(self, name)))

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The configuration that `to_json` wrote; a field that the document lacks, written before there was such an
        option, takes its default. Raises ConfigError where the document has a field too many, or one with a value not
        allowed."""
        if unexpected := sorted(document.keys() - options_of(cls).keys()):
            raise ConfigError(None, "{config} does not match: unexpected {unexpected}", config=cls.__name__,
                              unexpected=unexpected)
        return cls(**document)


@functools.cache
def options_of(config: type[Config]) -> dict[str, Option]:
    """The options that the fields of a configuration class declare, by name."""
    hints = typing.get_type_hints(config)
    found = {}
    for one in dataclasses.fields(config):
        kinds = scalar_types(hints[one.name])
        found[one.name] = replace(one.metadata["option"], name=one.name, default=one.default,
                                  kinds=tuple(kind for kind in kinds if kind is not types.NoneType),
                                  optional=types.NoneType in kinds)
    return found


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """Values as lines of TOML, which writes words, numbers and lists as JSON does; None is left out."""
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items() if value is not None]


def choose(table: Mapping[str, type[Config]], selector: str, name: str,
           values: Mapping[str, Any], given: Set[str]) -> Config:
    """Build the configuration that a table holds under a name, refusing options that are another's.

    Args:
        table: configuration class by name, e.g. the solvers.
        selector: option that selects from the table, e.g. "solver".
        name: the entry selected.
        values: value by option name, for the options of all entries together.
        given: the options that the user set, as opposed to left at their defaults.

    Returns:
        An instance of `table[name]`, with the given values and its own defaults for the others.

    Raises:
        ConfigError: the table has no such entry, or the user set an option that only other entries have.
    """
    if name not in table:
        raise unknown_choice(selector, name, table)
    names = {key: options_of(config).keys() for key, config in table.items()}
    for foreign in sorted(given & set().union(*names.values()) - names[name]):
        takers = " or ".join(key for key in table if foreign in names[key])
        raise ConfigError(foreign, f"does nothing with {{{selector}}} {{entry}}",
                          f"leave it out, or use {{{selector}}} {{takers}}", entry=name, takers=takers)
    return table[name](**{key: values[key] for key in names[name] & given})
