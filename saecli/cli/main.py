"""The command line: `sae [--home DIR] COMMAND`.

To add a command, write `saecli/cli/commands/NAME.py` with a function `command`, and a line in `COMMANDS`.
"""

import errno
import io
import os
import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from ..base import interrupts
from ..base.errors import ConfigError, PeerError, SaeError, did_you_mean, one_line, printable, shortened
from ..base.files import as_named
from ..base.home import Home
from ..base.memory import demand_address_space, is_out_of_memory
from ..base.torchrun import rank, world
from .help_page import demand_once, show_root_help
from .outline import is_outlined, loaded, outlined

COMMANDS = {
    "extract": "Run a language model over text and store its activations.",
    "import": "Put an array, or rows made of known features, into the store.",
    "train": "Train a sparse autoencoder from a store or a model.",
    "refit": "Give an SAE the exact decoder for a store's rows.",
    "eval": "Measure reconstruction, sparsity and the effect on the model.",
    "controls": "Train a run's controls, to see how much of it is the SAE's.",
    "sparsity": "Show how often latents fire, which are silent and which dense.",
    "geometry": "Show the spline: cells, power diagram, margins, references.",
    "probe": "Probe latents for labels of texts, beside the activations.",
    "steer": "Continue a text with latents of an SAE changed, beside the plain text.",
    "report": "Write pages to look at latents in a browser, from disk.",
    "export": "Write a run in another library's format.",
    "push": "Put a run on the Hugging Face hub, with a model card.",
    "list": "Show the stores and runs in the home folder, newest first.",
    "rm": "Remove stores and runs, with all of their files.",
    "demo": "Run the whole chain offline, printing each command first.",
}


HELP = {"-h", "--help", "--help-all"}
TOGETHER = ("extract", "train")  # commands that torchrun may run in several processes


class LazyGroup(TyperGroup):
    """Imports a command's module only when it is run, so that help pages and completion do not import torch."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before the command, and refuse a second --home."""
        if not ctx.resilient_parsing:
            demand_once(self, ctx, args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command to run, and load it."""
        name, listed, rest = super().resolve_command(ctx, args)
        if ctx.resilient_parsing:  # while a shell completes words
            return name, listed and outlined(name), rest
        if HELP.intersection(rest):
            outlined(name).make_context(name, [*rest], parent=ctx)  # shows the page and exits, unless it is a value
        demand_address_space()
        if listed and is_outlined(name):
            _refuse_early(name, rest, ctx)
        command = listed and loaded(name)
        interrupts.begin()
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; the error for a word that is not among an option's choices suggests the nearest."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = _plainly(error.message or "")
            raise
        except KeyboardInterrupt as stop:
            if not stop.args:
                print(interrupts.NOT_WRITTEN, file=sys.stderr)
                interrupts.told(stop)
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page of `sae --help`."""
        show_root_help(self, ctx)


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode="rich",
                  context_settings={"help_option_names": ["-h", "--help"]})


def _refuse_early(name: str, rest: list[str], ctx: Any) -> None:
    """Refuse what needs no torch to be seen: an option or a run that is missing, or an option that there is not."""
    try:
        given = outlined(name).make_context(name, [*rest], parent=ctx).params
    except typer.BadParameter as error:
        if type(error).__name__ == "MissingParameter":
            raise
        return  # the command itself knows other spellings of its choices
    home = Home(Path(ctx.params["home"]))
    if name == "train" and not any(given[one] for one in ("data", "model", "resume", "config")):
        home.stores.find(None)
    if given.get("run", ...) in (None, "") or given.get("runs", ...) in (None, [], ()):
        home.runs.find(None)


def _plainly(message: str) -> str:
    """Typer's message on an option's value, without phrases of its validation library."""
    message = message.removeprefix("Value error, ")
    if message.startswith("Input should be "):
        return f"expected {message.removeprefix('Input should be ').partition(',')[0]}."
    if found := re.fullmatch(r"'(.*)' is not one of (.*?)\.?", message):
        question = did_you_mean(found[1], re.findall("'([^']*)'", found[2]))
        return f"'{found[1]}' is not one of {found[2]}" + (f"; {question}" if question else ".")
    return message


def _listed_only() -> None:
    """A placeholder for a command in the list; `LazyGroup` runs the real one."""


for _name, _summary in COMMANDS.items():
    app.command(_name, help=_summary)(_listed_only)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sae {installed_version('saecli')}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    home: Annotated[Path, typer.Option(help="Folder of stores and runs.", metavar="PATH",
                                       envvar="SAE_HOME")] = Path(Home.DEFAULT),
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
        from ..base.distributed import join  # which imports torch

        join()
        if ctx.invoked_subcommand not in TOGETHER:
            raise ConfigError(f"sae {ctx.invoked_subcommand} runs in one process: expected {' or '.join(TOGETHER)}, "
                              f"which run in several, got {world()} processes; run it without torchrun")


def sentence_for(error: BaseException) -> str | None:
    """The sentence to print for an expected failure; None for a bug."""
    if isinstance(error, SaeError):
        return error.sentence
    if is_out_of_memory(error):
        return _out_of_memory(error)
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return (f"the disk is full, writing {error.filename or 'a file'}; nothing half-written was kept: "
                    f"free some space and run the same command again")
        return f"cannot use {error.filename}: {error.strerror}" if error.filename else None
    return None


def _out_of_memory(error: BaseException) -> str:
    """The sentence for a refused allocation."""
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
    """Run the command line, and end with its exit status; of several processes only rank 0 prints anything but errors.
    """
    errors = sys.stderr
    if rank() > 0 and not os.environ.get("SAE_DEBUG"):
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the end
    for stream in (sys.stdout, sys.stderr, errors):
        if isinstance(stream, io.TextIOWrapper):  # not closed, nor replaced by an embedding program
            stream.reconfigure(errors="backslashreplace")  # names may have characters that the encoding lacks
    try:
        try:
            app(prog_name="sae")
        finally:
            interrupts.end()
    except SystemExit as stop:
        if isinstance(stop.code, int) and stop.code:
            _end(stop.code)
        if world() > 1:
            from ..base.distributed import leave

            leave()
        raise
    except KeyboardInterrupt as stop:
        if not stop.args:
            print(interrupts.NOT_WRITTEN, file=errors)
        _end(interrupts.STATUS)
    except Exception as error:  # the outermost boundary: unforeseen errors are reported as bugs
        if interrupts.came():  # and a library turned it into another error
            _end(interrupts.STATUS)
        if os.environ.get("SAE_DEBUG"):
            raise
        sentence = sentence_for(error)
        if sentence is None:
            sentence = (f"unexpected {type(error).__name__}: {one_line(error)}; SAE_DEBUG=1 shows where, please report "
                        "it")
        sentence = as_named(printable(shortened(" ".join(sentence.split()))))
        if world() == 1:
            print(f"sae: {sentence}", file=errors)
        elif _is_first_to_say(sentence, error):
            print(f"sae: process {rank()} of {world()}: {sentence}", file=errors)
        _end(2 if isinstance(error, ConfigError) else 1)


def _end(status: int) -> NoReturn:
    """End with a status for a failure or an interrupt."""
    if world() == 1:
        sys.exit(status)
    # Tearing down the process group would wait for processes that have ended, or abort.
    for stream in (sys.__stdout__, sys.__stderr__):
        stream.flush()
    os._exit(status)


def _is_first_to_say(sentence: str, error: Exception) -> bool:
    """Whether no other process of this command has printed this sentence."""
    from ..base.distributed import is_first_to_say

    return is_first_to_say(sentence, blames_another=isinstance(error, PeerError))
