"""Arrays in files of several formats, read as blocks of float32 rows."""

from .array import ArraySource
from .formats import SUFFIXES
from .opening import FLATTEN, open_array

__all__ = ["FLATTEN", "SUFFIXES", "ArraySource", "open_array"]
