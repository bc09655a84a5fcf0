"""Figures in tables and sentences."""

UNITS = ("B", "kB", "MB", "GB", "TB")


def number(value: float | int | None) -> str:
    """A figure in a table: counts in full, measures to four significant digits, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"


def counted(count: int, word: str) -> str:
    """A count with its noun, as in "1 row" and "2,000 rows"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def size_words(count: float) -> str:
    """A number of bytes in units: 1.3 GB."""
    for unit in UNITS:
        if count < 1000 or unit == UNITS[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"
