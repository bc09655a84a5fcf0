"""Configurations: small frozen dataclasses that go to and from JSON and to command-line options.

A configuration subclasses `Config` and declares each field with `option(...)`, beside the code that it
configures. The declaration is the only place where a default, a bound and a help text stand:
`Config.__post_init__` checks them, `to_json`/`from_json` store them, and `commands/options.py` turns them
into Typer options.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Set
from dataclasses import MISSING, dataclass, field
from typing import Any, ClassVar, Self

from .errors import ConfigError, unknown_choice

# Whole numbers above 2^53 are lost in JSON readers that know only doubles; other numbers are to fit float32.
LARGEST = {int: 2**53, float: 1e30}


@dataclass(frozen=True)
class Option:
    """What a configuration field allows, beyond its type.

    Args:
        help: one sentence for `--help`, with the unit where there is one.
        minimum: smallest value allowed.
        above: value that must be exceeded.
        maximum: largest value allowed.
        below: value that must not be reached.
        choices: the words allowed; on a field that also takes numbers, the words allowed beside them.
        check: looks at a word in place of `choices`; raises ValueError with what the field must be.
        metavar: how the help page writes the value.
        once: whether it takes one value where others may be repeated, for one result a value.
    """

    help: str
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    check: Callable[[str], None] | None = None
    metavar: str | None = None
    once: bool = False


def option(default: Any, help: str, **limits: Any) -> Any:
    """Declare a configuration field.

    Args:
        default: value when none is given; `dataclasses.MISSING` for a field that must be given.
        help: one sentence for `--help`.
        **limits: the further fields of `Option`.

    Returns:
        A dataclass field that carries its `Option`.
    """
    return field(default=default, metadata={"option": Option(help, **limits)})


def flag_of(name: str) -> str:
    """The command-line spelling of a field: `d_sae` is `--d-sae`."""
    return "--" + name.replace("_", "-")


def scalar_types(annotation: Any) -> tuple[type, ...]:
    """The plain types that an annotation admits: `int | str | None` gives `(int, str, NoneType)`."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return typing.get_args(annotation)
    return (annotation,)


def _checked(name: str, annotation: Any, rule: Option, value: Any) -> Any:
    allowed = scalar_types(annotation)
    if type(value) in LARGEST and not abs(value) <= LARGEST[type(value)]:
        raise ConfigError(f"{flag_of(name)} must be a number of ordinary size, got {value!s:.40}")
    if float in allowed and type(value) is int:
        value = float(value)
    if type(value) not in allowed:
        wanted = " or ".join("nothing" if t is types.NoneType else t.__name__ for t in allowed)
        raise ConfigError(f"{flag_of(name)} must be {wanted}, got {value!r}")
    if isinstance(value, str):
        if rule.choices and value not in rule.choices:
            raise ConfigError(unknown_choice(flag_of(name), value, rule.choices))
        if rule.check is not None:
            try:
                rule.check(value)
            except ValueError as error:
                raise ConfigError(f"{flag_of(name)} must be {error}, got {value!r}") from None
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if rule.minimum is not None and not value >= rule.minimum:
            raise ConfigError(f"{flag_of(name)} must be at least {rule.minimum:g}, got {value:g}")
        if rule.above is not None and not value > rule.above:
            raise ConfigError(f"{flag_of(name)} must be above {rule.above:g}, got {value:g}")
        if rule.maximum is not None and not value <= rule.maximum:
            raise ConfigError(f"{flag_of(name)} must be at most {rule.maximum:g}, got {value:g}")
        if rule.below is not None and not value < rule.below:
            raise ConfigError(f"{flag_of(name)} must be below {rule.below:g}, got {value:g}")
    return value


@dataclass(frozen=True)
class Config:
    """Base of every configuration; see the module's docstring."""

    panel: ClassVar[str] = "Options"

    def __post_init__(self) -> None:
        for f, annotation, rule in fields(type(self)):
            object.__setattr__(self, f.name, _checked(f.name, annotation, rule, getattr(self, f.name)))

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The configuration that `to_json` wrote; a field that the document lacks, written before there was such an
        option, takes its default.

        Raises:
            ConfigError: the document has a field too many, lacks one that has no default, or has one with a value not
                allowed.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        needed = {f.name for f in dataclasses.fields(cls) if f.default is MISSING}
        unexpected, missing = sorted(document.keys() - names), sorted(needed - document.keys())
        if unexpected or missing:
            raise ConfigError(f"{cls.__name__} does not match: unexpected {unexpected}, missing {missing}")
        return cls(**document)


def fields(config: type[Config]) -> list[tuple[dataclasses.Field, Any, Option]]:
    """Each field of a configuration class with its resolved annotation and its `Option`."""
    hints = typing.get_type_hints(config)
    return [(f, hints[f.name], f.metadata["option"]) for f in dataclasses.fields(config)]


def choose(table: Mapping[str, type[Config]], selector: str, name: str,
           values: Mapping[str, Any], given: Set[str]) -> Config:
    """Build the configuration that a table holds under a name, refusing options that are another's.

    Args:
        table: configuration class by name, e.g. the solvers.
        selector: field that selects from the table, e.g. "solver".
        name: the entry selected.
        values: value by field name, for the fields of all entries together.
        given: the fields that the user set, as opposed to left at their defaults.

    Returns:
        An instance of `table[name]`, with the given values and its own defaults for the others.

    Raises:
        ConfigError: the table has no such entry, or the user set an option that only other entries have.
    """
    if name not in table:
        raise ConfigError(unknown_choice(flag_of(selector), name, table))
    names = {key: {f.name for f in dataclasses.fields(config)} for key, config in table.items()}
    for option_name in sorted(given & set().union(*names.values()) - names[name]):
        takers = " or ".join(key for key in table if option_name in names[key])
        raise ConfigError(f"{flag_of(option_name)} does nothing with {flag_of(selector)} {name}; "
                          f"leave it out, or use {flag_of(selector)} {takers}")
    return table[name](**{key: values[key] for key in names[name] & given})
