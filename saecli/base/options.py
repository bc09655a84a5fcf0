"""Options for Python, TOML files and the command line: annotated fields of a `Config`, or arguments of a function.

    rows: Annotated[Count, Shown("Rows to store.")] = 100_000
    alpha: Annotated[NonNegative | Literal["auto"], Shown("Ridge of the decoder step.")] = "auto"

pydantic checks a value against its annotation, strictly: True is no number, and "3" is none.
"""

import dataclasses
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, ParamSpec, Self, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from .errors import ConfigError
from .files import expectation
from .words import did_you_mean, flag_of, unknown_choice

Count = Annotated[int, Ge(1), Le(2**31 - 1)]  # PyTorch and HDF5 index with it
Seed = Annotated[int, Ge(0), Le(2**53)]  # readers of JSON may round larger ones
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Check = AfterValidator  # of a function that returns the value, or raises ValueError("auto, or ...")


@dataclass(frozen=True)
class Shown:
    """How an option appears on help pages and the command line."""

    help: str
    metavar: str | None = None
    panel: str | None = None  # of the help page; None for its configuration's
    advanced: bool = False  # shown by `--help-all` only
    once: bool = False  # not to be repeated where other numbers may be, for one result per value
    name: str = ""  # of the option; by default the field's or the argument's
    kind: Any = None  # type of the option's value; by default the field's or the argument's
    default_words: str | None = None  # the default in words


Advanced = functools.partial(Shown, advanced=True)
REQUIRED = inspect.Parameter.empty  # the default of an option that has none


@dataclass(frozen=True)
class Option(Shown):
    """A field of a configuration, or an argument of a function, as an option."""

    argument: str = ""
    default: Any = None

    @property
    def several(self) -> bool:
        """Whether values make one tuple."""
        return any(get_origin(kind) is tuple for kind in _plain_types(self.kind))

    @property
    def item(self) -> Any:
        """The annotation of one value."""
        tuples = [kind for kind in _plain_types(self.kind) if get_origin(kind) is tuple]
        return get_args(tuples[0])[0] if tuples else self.kind

    @property
    def types(self) -> list[type]:
        """The types of one value, such as int and str for `int | Literal["auto"]`."""
        kinds = [str if get_origin(kind) is Literal else kind for kind in _plain_types(self.item)]
        return [kind for kind in kinds if kind is not types.NoneType]

    @property
    def choices(self) -> list[str]:
        """The words that a value may be, besides any numbers."""
        literals = [kind for kind in _plain_types(self.item) if get_origin(kind) is Literal]
        return [word for literal in literals for word in get_args(literal)]

    @property
    def repeatable(self) -> bool:
        """Whether a command may give one result per value."""
        return not (self.once or self.several) and not {int, float}.isdisjoint(self.types)

    def checked(self, value: Any) -> Any:
        """The value, of the option's type; ConfigError if not allowed."""
        if self.several and value is not None and not isinstance(value, tuple):
            value = tuple(value) if isinstance(value, list) else (value,)
        return self._validated(_adapter(self.kind).validate_python, value)

    def parsed(self, text: str) -> Any:
        """One value from the text of a command line or a file."""
        return self._validated(_adapter(self.item).validate_strings, text)

    def _validated(self, validate: Callable[[Any], Any], value: Any) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            expected = " or ".join(dict.fromkeys(map(expectation, problems)))
            got = problems[0]["input"]
            question = did_you_mean(got, self.choices) if isinstance(got, str) else ""
            raise ConfigError(
                f"{flag_of(self.name)} must be {expected}, got {got!r}"
                + (f"; {question}" if question else "")
            ) from None


def _plain_types(kind: Any) -> list[Any]:
    """The members of a union, without their constraints."""
    if get_origin(kind) is Annotated:
        return _plain_types(get_args(kind)[0])
    if get_origin(kind) in (typing.Union, types.UnionType):
        return [plain for member in get_args(kind) for plain in _plain_types(member)]
    return [kind]


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


@dataclass(frozen=True)
class Config:
    """Options, checked when it is made; ConfigError for a value that is not allowed."""

    panel: ClassVar[str] = "Options"

    def __post_init__(self) -> None:
        for name, option in options_of(type(self)).items():
            object.__setattr__(self, name, option.checked(getattr(self, name)))

    @classmethod
    def among(cls, options: Mapping[str, Any]) -> Self:
        """From those of the options that it has."""
        return cls(**{name: options[name] for name in options_of(cls) if name in options})

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Missing fields take their defaults, unexpected ones are refused."""
        if unexpected := sorted(document.keys() - options_of(cls).keys()):
            raise ConfigError(f"{cls.__name__} does not match: unexpected {unexpected}")
        return cls(**document)


def options_of(config: type[Config]) -> dict[str, Option]:
    declared: Any = config  # mypy takes a class whose instances define __hash__ for unhashable
    return _options_of(declared)


@functools.cache
def _options_of(config: Any) -> dict[str, Option]:
    kinds = typing.get_type_hints(config, include_extras=True)
    options = {}
    for field in dataclasses.fields(config):
        kind = kinds[field.name]
        (shown,) = (note for note in kind.__metadata__ if isinstance(note, Shown))
        options[field.name] = _option(shown, field.name, kind, field.default)
    return options


def _option(shown: Shown, argument: str, kind: Any, default: Any) -> Option:
    option = Option(**vars(shown), argument=argument, default=default)
    return replace(option, name=shown.name or argument, kind=shown.kind or kind)


def arguments_of(function: Callable[..., Any]) -> dict[str, Option]:
    options = {}
    for name, parameter in inspect.signature(function).parameters.items():
        for note in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(note, Shown):
                options[name] = _option(note, name, parameter.annotation, parameter.default)
    return options


def all_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a function by argument: those given, and defaults."""
    defaults = {name: option.default for name, option in arguments_of(function).items()}
    return {**defaults, **given}


P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: arguments are checked if their options have their type, and its docstring gets the
    help of all."""
    signature, options = inspect.signature(function), arguments_of(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:  # which does not name the function
            raise TypeError(f"{function.__name__}() {error}") from None
        for name, value in bound.arguments.items():
            if name in options and options[name].kind is signature.parameters[name].annotation:
                bound.arguments[name] = options[name].checked(value)
        return function(*bound.args, **bound.kwargs)

    _add_help(call, options)
    return call


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def with_options(config: type[Config]) -> Callable[[FunctionT], FunctionT]:
    """Decorate a function whose keywords are options of a configuration: signature and docstring show them."""

    def decorate(function: FunctionT) -> FunctionT:
        *arguments, _ = inspect.signature(function).parameters.values()
        names = {argument.name for argument in arguments}
        options = {name: each for name, each in options_of(config).items() if name not in names}
        arguments += [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.kind
            )
            for name, each in options.items()
        ]
        vars(function)["__signature__"] = inspect.Signature(arguments)
        _add_help(function, options)
        return function

    return decorate


def _add_help(function: Callable[..., Any], options: Mapping[str, Option]) -> None:
    helps = [f"    {name}: {option.help}" for name, option in options.items()]
    function.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Options:", *helps])


def options_from(
    config: type[Config], names: Iterable[str], helps: Mapping[str, str], **changes: Any
) -> list[Option]:
    """Some options of a configuration for another command, with the help in `helps`, and with changes."""
    options = options_of(config)
    return [
        replace(options[name], help=helps.get(name, options[name].help), **changes)
        for name in names
    ]


def words_of(values: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            flag = flag_of(name)
            if str(item).startswith("-"):  # else taken for an option
                words.append(f"{flag}={item}")
            else:
                words += [flag] if item is True else [flag, str(item)]
    return words


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """Values as lines of TOML; None is left out."""
    return [
        # TOML forbids the one control character that JSON allows.
        f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
        for key, value in values.items()
        if value is not None
    ]


ConfigT = TypeVar("ConfigT", bound=Config)


def choose(
    table: Mapping[str, type[ConfigT]], selector: str, name: str, options: Mapping[str, Any]
) -> ConfigT:
    """Build `table[name]`, which the option `selector` names, from the user's `options`; refuses those of other
    entries alone."""
    if name not in table:
        raise unknown_choice(selector, name, table)
    names = {key: options_of(config).keys() for key, config in table.items()}
    for foreign in sorted(options.keys() & set().union(*names.values()) - names[name]):
        takers = " or ".join(key for key in table if foreign in names[key])
        raise ConfigError(
            f"{flag_of(foreign)} does nothing with {flag_of(selector)} {name}; leave it out, or use {takers}"
        )
    return table[name].among(options)


def demand_known(
    function: str, options: Iterable[str], known: Collection[str], command: str | None = None
) -> None:
    """ConfigError, with advice, for an option that a function, or its `command`, lacks."""
    expected = f"one of `sae {command}`'s" if command else ", ".join(known) or "none"
    for name in options:
        if name not in known:
            advice = did_you_mean(name, known) or f"expected {expected}"
            raise ConfigError(f"{function} has no option {name}; {advice}")
