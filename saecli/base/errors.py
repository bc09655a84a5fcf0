"""What can go wrong, as one tree.

    SaeError
    |-- ConfigError   (ValueError)   an option or argument that cannot work
    |-- StoreError    (OSError)      an activation store or one of its shards
    |   `-- StoreOptionError          the same, where another value of an option would help
    |-- FormatError   (ValueError)   a file in a format that cannot be read or written
    |-- RunError      (ValueError)   a training run that is missing, foreign or unfinished
    |-- ModelError    (OSError)      a language model or text that cannot be loaded
    |-- HubError      (OSError)      a repository of SAEs on the Hugging Face hub that cannot be read or written
    |-- TrainingError (RuntimeError) a training run that cannot go on
    |-- MachineError  (RuntimeError) a machine that has too little of something
    `-- PeerError     (RuntimeError) another process of the same command that has ended

Each message is one sentence: what failed; expected X, got Y; what to do.
"""

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from string import Formatter
from typing import Self

LONGEST_WORD = 1000  # characters of a sentence's longest word; paths are shorter


class SaeError(Exception):
    """Base of every error that the command line reports as one sentence and exit status 1, a `ConfigError` 2."""

    def sentence(self, spell: Callable[[str], str]) -> str:
        """The message, an option's name, where the error names options apart, written as `spell` gives it."""
        return str(self)

    def within(self, before: str = "", after: str = "") -> Self:
        """The same error, with words of the caller's before its sentence, after it, or both."""
        return type(self)(f"{before}: " * bool(before) + str(self) + f"; {after}" * bool(after))


class _OptionsError(SaeError):
    """An error whose sentence names options, each caller in its own spelling: see `ConfigError`, the first of them."""

    def __init__(self, option: str | None, problem: str, remedy: str = "", **values: object) -> None:
        self.option, self.problem, self.remedy, self.values = option, problem, remedy, values
        super().__init__(option, problem, remedy)

    @property
    def options(self) -> list[str]:
        """The options that it names, the one that it is about first."""
        named = [name for _, name, _, _ in Formatter().parse(f"{self.problem}{self.remedy}") if name]
        own = [] if self.option is None else [self.option]
        return [name for name in dict.fromkeys(own + named) if name not in self.values]

    def sentence(self, spell: Callable[[str], str]) -> str:
        """The whole message, an option's name written as `spell` gives it."""
        names = {name: spell(name) for name in self.options} | self.values
        text = self.problem if self.option is None else f"{spell(self.option)} {self.problem}"
        return (f"{text}; {self.remedy}" if self.remedy else text).format_map(names)

    def within(self, before: str = "", after: str = "") -> Self:
        own = "" if self.option is None else f"{{{self.option}}} "
        name = f"words{len(self.values)}"  # an error can be passed on more than once
        given = {f"{name}_before": before, f"{name}_after": after}
        problem = (f"{{{name}_before}}: " if before else "") + own + self.problem
        remedy = "; ".join([self.remedy] * bool(self.remedy) + [f"{{{name}_after}}"] * bool(after))
        return type(self)(None, problem, remedy, **self.values, **given)

    def __str__(self) -> str:
        return self.sentence(str)


class ConfigError(_OptionsError, ValueError):
    """An option or argument that cannot work.

        ConfigError("k", "must be at most {d_sae}, {most}, got {got}", "lower {k} or raise {d_sae}", most=64, got=65)

    Args:
        option: the name, in Python's spelling, of the option that it is about; None for none in particular.
        problem: what is wrong with it. A name in braces stands for a value, else for an option, which the command line
            spells `--d-sae` and Python `d_sae`.
        remedy: what to do about it, spelled alike.
        **values: what the names in braces that are no options stand for.
    """


class StoreError(SaeError, OSError):
    """An activation store or one of its shards that is missing, damaged or of another version."""


class StoreOptionError(_OptionsError, StoreError):
    """A StoreError that advises another value of an option; its arguments are those of `ConfigError`."""


class FormatError(SaeError, ValueError):
    """A file whose contents are not what its format demands."""


class RunError(SaeError, ValueError):
    """A training run that is missing, foreign or unfinished."""


class ModelError(SaeError, OSError):
    """A language model or a text source that cannot be loaded."""


class HubError(SaeError, OSError):
    """A repository of SAEs on the Hugging Face hub that cannot be read or written."""


class TrainingError(_OptionsError, RuntimeError):
    """A training run that cannot go on; its arguments are those of `ConfigError`."""


class MachineError(SaeError, RuntimeError):
    """A machine, or what it grants this process, that has too little of something."""


class PeerError(SaeError, RuntimeError):
    """Another process of the same command that has ended, or that ends this one."""


def one_line(error: BaseException) -> str:
    """The error's message in one line, without its final stop, cut where it becomes a page."""
    message = " ".join(str(error).split()) or type(error).__name__
    return (message if len(message) <= 300 else f"{message[:300]}...").rstrip(".")


def printable(text: str) -> str:
    """The text, all escaped that a terminal would act on or that no encoding has: control characters, changes of
    direction, bytes of a file's name that are no UTF-8."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def shortened(sentence: str) -> str:
    """A sentence with words of over `LONGEST_WORD` characters, such as a text given as a name, cut."""
    return re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: f"{word[0][:60]}... ({len(word[0]):,} characters)",
                  sentence)


def did_you_mean(word: str, choices: Iterable[str], most: int = 1) -> str:
    """The question whether a word was meant for one of the choices that are spelt nearly as it is.

    Args:
        word: what was given.
        choices: what could have been.
        most: how many choices the question names at most.

    Returns:
        "did you mean relu?", or nothing where none is near.
    """
    spelt = {choice.casefold(): choice for choice in choices}
    near = [spelt[one] for one in get_close_matches(word.casefold(), spelt, most)]
    *others, last = near or [""]
    return f"did you mean {', '.join(others)}{' or ' * bool(others)}{last}?" if near else ""


def unknown_choice(option: str, word: str, choices: Iterable[str]) -> ConfigError:
    """The error on a word that is none of the choices of what it was given for, such as act."""
    choices = list(choices)
    return ConfigError(option, "must be one of {choices}, got {word}", did_you_mean(word, choices),
                       choices=", ".join(choices), word=repr(word))
