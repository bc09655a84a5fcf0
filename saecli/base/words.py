"""Numbers, choices and options in sentences."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from .errors import ConfigError

UNITS = ("B", "kB", "MB", "GB", "TB")


def flag_of(name: str) -> str:
    """The command-line spelling of an option: `d_sae` is `--d-sae`."""
    return "--" + name.replace("_", "-")


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A question for the closest choice; empty if none is close."""
    spelt = {choice.casefold(): choice for choice in choices}
    close = get_close_matches(word.casefold(), spelt, 1)
    return f"did you mean {spelt[close[0]]}?" if close else ""


def unknown_choice(option: str, word: str, choices: Collection[str]) -> ConfigError:
    question = did_you_mean(word, choices)
    return ConfigError(
        f"{flag_of(option)} must be one of {', '.join(choices)}, got {word!r}"
        + (f"; {question}" if question else "")
    )


def does_nothing(option: str, why: str) -> ConfigError:
    """Of an option without effect: `why` says where, and after a semicolon what to do."""
    return ConfigError(f"{flag_of(option)} does nothing {why}")


def refuse_idle(options: Iterable[str], why: str) -> None:
    """ConfigError for the first of options that all do nothing."""
    for option in sorted(options):
        raise does_nothing(option, why)


def demand_at_least(option: str, value: float | None, least: int = 1) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{flag_of(option)} must be at least {least}, got {value}")


def demand_text(option: str, text: object) -> None:
    """ConfigError for a blank text, or one that is not Unicode: a command line of other bytes has such."""
    words = text.strip() if isinstance(text, str) else text
    unreadable = isinstance(text, str) and text != text.encode(errors="ignore").decode()
    if not words or unreadable:
        raise ConfigError(f"{option} must be in UTF-8 and not blank, got {text!a:.60}")


def number(value: float | int | None) -> str:
    """A figure in a table: counts in full, measures to four significant digits, None as a dash."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def counted(count: int, word: str) -> str:
    """As in "1 row" and "2,000 rows"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def numbers_in_words(numbers: Iterable[int]) -> str:
    """Different numbers as in "3", "0, 1, 7" and, if three or more follow each other, "4 to 29"."""
    ordered = sorted(numbers)
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))


def size_words(count: float) -> str:
    """Bytes in units, as in 1.3 GB."""
    power = sum(count >= 1000**power for power in range(1, len(UNITS)))
    value = count / 1000**power
    digits = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return f"{digits} {UNITS[power]}"
