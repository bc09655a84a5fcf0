"""The options that several commands share, and the session that each command starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..console import Console
from ..errors import ConfigError
from ..files import check_place, is_free
from ..home import Home


def store_names(ctx: typer.Context) -> list[str]:
    """What a shell completes to the name of a store."""
    return _home(ctx).stores.names()


def run_names(ctx: typer.Context) -> list[str]:
    """What a shell completes to the name of a run."""
    return _home(ctx).runs.names()


def unfinished_names(ctx: typer.Context) -> list[str]:
    """What a shell completes to the name of a run to go on with."""
    return _home(ctx).runs.unfinished()


def _home(ctx: typer.Context) -> Home:
    return Home(Path(ctx.find_root().params["home"]))  # while a shell completes a line, no session is made


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, everything else on stderr.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Save a picture here (PNG, PDF or SVG by its ending).")]
Run = Annotated[str | None, typer.Argument(
    metavar="RUN", help="Run name, folder that holds an SAE, or such as user/repo/folder@revision on the Hugging Face "
                        "hub.",
    show_default="the newest run", autocompletion=run_names)]
Runs = Annotated[list[str] | None, typer.Argument(
    metavar="RUN", help="Run names, folders that hold an SAE, or such as user/repo/folder@revision on the Hugging Face "
                        "hub.",
    show_default="the newest run", autocompletion=run_names)]
Device = Annotated[str, typer.Option("--device", help="Where to compute: cpu, cuda, cuda:1; auto takes cuda where "
                                                      "there is one.")]


@dataclass(frozen=True)
class Session:
    """What every command is handed: where things live, and how to speak.

    Args:
        home: the folder of stores and runs.
        console: the output sink.
    """

    home: Home
    console: Console


def start(ctx: typer.Context, as_json: bool, plot: Path | None = None, csv: Path | None = None,
          out: Path | None = None) -> Session:
    """The session of a command, its report set to tables or to JSON.

    Args:
        ctx: the command's context.
        as_json: what `--json` says.
        plot: the picture to draw.
        csv: the table to write.
        out: the folder to write, new or empty.

    Raises:
        ConfigError: the picture is of no known kind, or one of them cannot be written where it is asked for; better
            said before the work than after it.
    """
    if plot is not None:
        from ..plots import check_suffix  # matplotlib takes a second to import

        check_suffix(plot)
    if out is not None and not is_free(out):
        raise ConfigError(None, "cannot write to {folder}: expected an empty or a new folder, got one in use",
                          "name another", folder=out)
    for path in (plot, csv, out):
        if path is not None:
            try:
                check_place(path / "index.html" if path is out else path)
            except OSError as error:
                raise ConfigError(None, "cannot write {path}: {reason}", "name another place", path=path,
                                  reason=error.strerror or error) from error
    return Session(ctx.find_root().obj, Console(as_json))
