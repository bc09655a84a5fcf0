"""The command line: `sae [--home DIR] COMMAND`.

To add a command, write `saecli/commands/NAME.py` with a function `command`, and a line in `COMMANDS`.
"""

import errno
import importlib
import inspect
import io
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from . import __version__, interrupts
from .config import flag_of
from .errors import ConfigError, PeerError, SaeError, did_you_mean, one_line, printable
from .files import as_named
from .help_page import Command, show_root_help
from .home import Home
from .memory import demand_address_space, is_out_of_memory
from .torchrun import rank, world

COMMANDS = {
    "extract": "Run a language model over text and store its activations.",
    "import": "Put an array, or rows made of known features, into the store.",
    "train": "Train a sparse autoencoder from a store.",
    "eval": "Measure reconstruction, sparsity and the effect on the model.",
    "sparsity": "Show how often latents fire, which are silent and which dense.",
    "geometry": "Show the spline: cells, power diagram, margins, references.",
    "report": "Write pages to look at latents in a browser, from disk.",
    "export": "Write a run in another library's format.",
    "push": "Put a run on the Hugging Face hub, with a model card.",
    "list": "Show the stores and runs in the home folder, newest first.",
    "demo": "Run the whole chain offline, printing each command first.",
}


TOGETHER = ("extract", "train")  # commands that several processes run together, started by torchrun


def load(name: str) -> Any:
    """The Typer command of that name, its module imported now."""
    module = importlib.import_module(f".commands.{'import_' if name == 'import' else name}", __package__)
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    paragraphs = inspect.getdoc(module.command).split("\n\n")
    app.command(name, cls=Command, help="\n\n".join(" ".join(lines.split()) for lines in paragraphs))(module.command)
    command = typer.main.get_command(app)
    command.advanced = getattr(module.command, "advanced", Command.advanced)
    return command


class LazyGroup(TyperGroup):
    """Imports a command's module when that command is run, so that `sae --help` imports no torch."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command to run, and load it."""
        name, listed, rest = super().resolve_command(ctx, args)
        demand_address_space()
        command = listed and load(name)
        interrupts.begin()
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; of a word that is none of an option's choices, its error says which one is near."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = _plainly(error.message or "")
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page of `sae --help`."""
        show_root_help(self, ctx)


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode="rich",
                  context_settings={"help_option_names": ["-h", "--help"]})


def _plainly(message: str) -> str:
    """What Typer says of an option's value, without the marks of the library that it checks with."""
    message = message.removeprefix("Value error, ")
    if message.startswith("Input should be "):
        return f"expected {message.removeprefix('Input should be ').partition(',')[0]}."
    if found := re.fullmatch(r"'(.*)' is not one of (.*?)\.?", message):
        question = did_you_mean(found[1], re.findall("'([^']*)'", found[2]))
        return f"'{found[1]}' is not one of {found[2]}" + (f"; {question}" if question else ".")
    return message


def _listed_only() -> None:
    """Stands for a command in the list; `LazyGroup` runs the real one."""


for _name, _summary in COMMANDS.items():
    app.command(_name, help=_summary)(_listed_only)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sae {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    home: Annotated[Path, typer.Option(help="Folder of stores and runs.", envvar="SAE_HOME")] = Path(Home.DEFAULT),
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True,
                                          help="Print the version and exit.")] = False,
) -> None:
    """From a language model's activations to a trained, evaluated and understood sparse autoencoder.

    The chain in three lines:

        sae extract --model google/gemma-2-2b --layer 12

        sae train --solver pam-sgd --act relu

        sae eval

    Without a network, `sae demo` runs all of it on a small bundled model.
    """
    ctx.obj = Home(home)
    if world() > 1:
        from .distributed import join  # which imports torch

        join()
        if ctx.invoked_subcommand not in TOGETHER:
            raise ConfigError(None, "sae {command} runs in one process: expected {together}, which run in several, got "
                                    "{got} processes", "run it without torchrun", command=ctx.invoked_subcommand,
                              together=" or ".join(TOGETHER), got=world())


def sentence_for(error: BaseException) -> str | None:
    """The one sentence that a user is told of an expected failure; None for a bug of ours."""
    if isinstance(error, SaeError):
        return error.sentence(flag_of)
    if is_out_of_memory(error):
        return _out_of_memory(error)
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return (f"the disk is full, writing {error.filename or 'a file'}; nothing half-written was kept: "
                    f"free some space and run the same command again")
        return f"cannot use {error.filename}: {error.strerror}" if error.filename else None
    return None


def _out_of_memory(error: BaseException) -> str:
    """What was refused, and what to do about it."""
    words = str(error)
    if isinstance(error, ImportError):
        return (f"out of memory: a library could not be loaded ({one_line(error)}); raise the limit on address space "
                "(ulimit -v), or end other programs")
    if "start new thread" in words:
        return ("out of memory: the system refused a thread; raise the limits on processes and address space "
                "(ulimit -u, ulimit -v), or end other programs")
    where = "the GPU" if "CUDA" in words or "CUBLAS" in words else "the machine"
    return f"out of memory: {where} refused an allocation; use a smaller --batch-size or, to train, --d-sae"


def main() -> None:
    """Run the command line, and end with its exit status; of several processes only the first says what is not an
    error."""
    errors = sys.stderr
    if rank() > 0 and not os.environ.get("SAE_DEBUG"):
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the end
    for stream in (sys.stdout, sys.stderr, errors):
        if isinstance(stream, io.TextIOWrapper):  # not closed, nor taken over by another program's own
            stream.reconfigure(errors="backslashreplace")  # names can hold what a terminal's encoding cannot
    try:
        try:
            app(prog_name="sae")
        finally:
            interrupts.end()
    except SystemExit as stop:
        if isinstance(stop.code, int) and stop.code:
            _end(stop.code)
        if world() > 1:
            from .distributed import leave

            leave()
        raise
    except KeyboardInterrupt:
        _end(interrupts.STATUS)
    except Exception as error:  # the outermost boundary: whatever was not foreseen is named as a bug
        if interrupts.came():  # which a library turned into an error of its own
            _end(interrupts.STATUS)
        if os.environ.get("SAE_DEBUG"):
            raise
        sentence = sentence_for(error)
        if sentence is None:
            sentence = (f"unexpected {type(error).__name__}: {one_line(error)}; SAE_DEBUG=1 shows where, please report "
                        "it")
        sentence = as_named(printable(" ".join(sentence.split())))
        if world() == 1:
            print(f"sae: {sentence}", file=errors)
        elif _is_first_to_say(sentence, error):
            print(f"sae: process {rank()} of {world()}: {sentence}", file=errors)
        _end(1)


def _end(status: int) -> NoReturn:
    """End with a status that says that something failed, or was interrupted."""
    if world() == 1:
        sys.exit(status)
    # What this process still shares with others would wait for those that are gone, or abort as Python tears it down.
    for stream in (sys.__stdout__, sys.__stderr__):
        stream.flush()
    os._exit(status)


def _is_first_to_say(sentence: str, error: Exception) -> bool:
    """Whether none of the other processes that run this command has said it."""
    from .distributed import is_first_to_say

    return is_first_to_say(sentence, blames_another=isinstance(error, PeerError))
