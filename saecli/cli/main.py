"""The command line: `sae [--home DIR] COMMAND`. To add a command, write `saecli/cli/NAME.py`, with its help as
docstring and a function `command`, and add NAME to `GROUPS`."""

import io
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..base.errors import ConfigError, SaeError, one_line
from ..base.machine import is_disk_full, is_out_of_memory
from ..base.processes import rank, world
from ..base.words import printable

GROUPS = {
    "Try": "demo",
    "Rows": "extract import list rm",
    "Train": "train finetune refit",
    "Measure": "eval sparsity geometry probe contrast controls",
    "Look": "serve read explain steer effects report",
    "Share": "export push",
}
COMMANDS = {name: group for group, names in GROUPS.items() for name in names.split()}
TOGETHER = ("extract", "train", "finetune")  # commands that torchrun may run in several processes


def _module(name: str) -> str:
    return "import_" if name == "import" else name


def summary(name: str) -> str:
    """The first line of a command's help, read from its file: the list of commands imports none."""
    with Path(__file__).with_name(f"{_module(name)}.py").open(encoding="utf-8") as file:
        return file.readline().strip().strip('"')


def load_command(name: str) -> Any:
    module = import_module(f".{_module(name)}", __package__)
    paragraphs = (module.__doc__ or "").strip().split("\n\n")
    help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name, help=escape(help))(module.command)
    command: Any = typer.main.get_command(app)
    hidden = sum(param.hidden for param in command.params)
    if hidden:
        command.epilog = f"sae {name} --help-all shows {hidden} more options."
    return command


class LazyGroup(TyperGroup):
    """Imports a command's module only when it is named."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # for the list
        group = COMMANDS.get(cmd_name)
        return group and TyperCommand(cmd_name, help=summary(cmd_name), rich_help_panel=group)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and load_command(str(name)), rest


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sae {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    home: Annotated[
        Path, typer.Option(help="Folder of stores and runs.", metavar="PATH", envvar="SAE_HOME")
    ] = Path("sae-data"),
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """From a language model's activations to a trained, evaluated and understood sparse autoencoder.

    The chain in three lines:

        sae extract --model google/gemma-2-2b --layer 12

        sae train --solver pam-sgd --act batchtopk

        sae eval

    Without a network, `sae demo` runs all of it on a small bundled model.
    """
    from ..base.home import Home

    ctx.obj = Home.at(home)
    if world() > 1:
        from ..base.processes import join_processes  # which imports torch

        join_processes()
        if ctx.invoked_subcommand not in TOGETHER:
            raise ConfigError(
                f"sae {ctx.invoked_subcommand} runs in one process: expected {' or '.join(TOGETHER)}, got "
                f"{world()} processes; run it without torchrun"
            )


def sentence_for(error: BaseException) -> str | None:
    """The sentence to print for an expected failure; None for a bug."""
    if isinstance(error, SaeError):
        return str(error)
    if is_out_of_memory(error):
        where = "the GPU" if "CUDA" in str(error) else "the machine"
        return (
            f"out of memory: {where} refused an allocation; use a smaller --batch-size or --d-sae"
        )
    if isinstance(error, OSError) and is_disk_full(error):
        where = f", writing {error.filename}" if error.filename else ""
        return f"the disk is full{where}; free some space and run the same command again"
    if isinstance(error, OSError) and error.filename:
        return f"cannot use {error.filename}: {error.strerror}"
    return None


def main() -> None:
    """Run the command line, and end with its exit status; only rank 0 prints more than errors."""
    errors = sys.stderr
    if rank() > 0 and not os.environ.get("SAE_DEBUG"):
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the end
    for stream in (sys.stdout, sys.stderr, errors):
        if isinstance(stream, io.TextIOWrapper):  # not closed, nor replaced by an embedding program
            stream.reconfigure(errors="backslashreplace")  # for names that the encoding lacks
    try:
        app(prog_name="sae")  # which exits with status 130 after Ctrl-C
    except SystemExit as stop:
        if isinstance(stop.code, int) and stop.code:
            _end(stop.code)
        if world() > 1:
            from ..base.processes import leave

            leave()
        raise
    except Exception as error:  # the outermost boundary: unforeseen errors are reported as bugs
        if os.environ.get("SAE_DEBUG"):
            raise
        sentence = sentence_for(error)
        if sentence is None:
            said = f"unexpected {type(error).__name__}: {one_line(error)}"
            sentence = f"{said}; SAE_DEBUG=1 shows where, please report it"
        sentence = printable(" ".join(sentence.split()))
        where = f"process {rank()} of {world()}: " if world() > 1 else ""
        print(f"sae: {where}{sentence}", file=errors)
        _end(2 if isinstance(error, ConfigError) else 1)


def _end(status: int) -> NoReturn:
    if world() == 1:
        sys.exit(status)
    # Tearing down the process group would wait for processes that have ended, or abort.
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(status)
