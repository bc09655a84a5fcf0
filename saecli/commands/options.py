"""The names of `saecli.options`, for the commands that still take them from here."""

from ..options import *  # noqa: F403
