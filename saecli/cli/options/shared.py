"""The options common to several commands, and the session that each command starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ...base.console import Console
from ...base.errors import ConfigError
from ...base.files import check_place, is_free
from ...base.home import Home


def store_names(ctx: typer.Context) -> list[str]:
    """Names of stores, for shell completion."""
    return _home(ctx).stores.names()


def run_names(ctx: typer.Context) -> list[str]:
    """Names of runs, for shell completion."""
    return _home(ctx).runs.names()


def all_names(ctx: typer.Context) -> list[str]:
    """Names of runs and of stores, for shell completion."""
    return [*run_names(ctx), *store_names(ctx)]


def unfinished_names(ctx: typer.Context) -> list[str]:
    """Names of unfinished runs, for shell completion."""
    return _home(ctx).runs.unfinished()


def _home(ctx: typer.Context) -> Home:
    return Home(Path(ctx.find_root().params["home"]))  # there is no session during completion


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, everything else on stderr.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Save a picture here (PNG, PDF or SVG by its ending).")]
Run = Annotated[str | None, typer.Argument(
    metavar="RUN", help="Run name, folder that holds an SAE, or user/repo/folder@revision on the Hugging Face hub.",
    show_default="the newest run", autocompletion=run_names)]
Runs = Annotated[list[str] | None, typer.Argument(
    metavar="RUN", help="Run names, folders that hold an SAE, or user/repo/folder@revision on the Hugging Face hub.",
    show_default="the newest run", autocompletion=run_names)]
Device = Annotated[str, typer.Option("--device", help="Where to compute: cpu, cuda, cuda:1; auto: cuda if available.")]


@dataclass(frozen=True)
class Session:
    """The home and the output of a command.

    Args:
        home: the folder of stores and runs.
        console: the output sink.
    """

    home: Home
    console: Console


def start(ctx: typer.Context, as_json: bool, plot: Path | None = None, csv: Path | None = None,
          out: Path | None = None) -> Session:
    """Start a command's session, and check its output paths before the work.

    Args:
        ctx: the command's context.
        as_json: the value of `--json`.
        plot: the picture to draw.
        csv: the table to write.
        out: the folder to write, new or empty.

    Raises:
        ConfigError: the picture's ending is unknown, or a path cannot be written.
    """
    if plot is not None:
        from ...show.style import check_suffix  # matplotlib takes a second to import

        check_suffix(plot)
    if out is not None and not is_free(out):
        raise ConfigError(f"cannot write to {out}: expected an empty or a new folder, got one in use; name another")
    for path in (plot, csv, out):
        if path is not None:
            try:
                there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
                check_place(there / "index.html" if path is out else path)
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {error.strerror or error}; name another path") from error
    return Session(ctx.find_root().obj, Console(as_json))
