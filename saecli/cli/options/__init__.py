"""The options of commands: each is declared once, and becomes a parameter on the command line, a key in the file of
`--config`, and a line of help."""

from .given import Given, configured
from .shared import Device, Json, Plot, Run, Runs, Session, all_names, run_names, start, store_names, unfinished_names

__all__ = ["Device", "Given", "Json", "Plot", "Run", "Runs", "Session", "all_names", "configured", "run_names", "start",
           "store_names", "unfinished_names"]
