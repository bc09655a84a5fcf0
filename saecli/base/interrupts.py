"""Ctrl-C at any moment of a command: exit status 130, and one sentence on what was kept. It is installed before
anything else, and so imports little."""

import os
import signal
import sys
import threading

TYPE_CHECKING = False  # while typing was imported, Python would still handle Ctrl-C
if TYPE_CHECKING:
    from typing import Any

STATUS = 130
NOT_BEGUN = "stopped before it began; nothing was changed"
NOT_WRITTEN = "stopped; nothing was written"
_came = False


def watch() -> None:
    """From here on Ctrl-C ends the process at once, since an exception would leave libraries half loaded."""
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # under `nohup` it stays ignored
        signal.signal(signal.SIGINT, _leave)
        sys.unraisablehook = _pass_on


def begin() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt: the command says what it kept."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, _interrupt)


def end() -> None:
    """From here on Ctrl-C does nothing, as the exit status is decided."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def told(stop: BaseException) -> None:
    """Mark an interrupt as explained to the user; `NOT_WRITTEN` is said of others."""
    if isinstance(stop, KeyboardInterrupt):
        stop.args = ("told",)


def came() -> bool:
    """Whether Ctrl-C was pressed, even if a library swallowed or changed the exception."""
    return _came


def _leave(number: int, frame: "Any") -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"{NOT_BEGUN}\n".encode())
    os._exit(STATUS)


def _interrupt(number: int, frame: "Any") -> None:
    global _came
    _came = True
    raise KeyboardInterrupt


def _pass_on(ignored: "Any") -> None:
    """Interrupt again after a callback that swallowed the interrupt."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        main = threading.main_thread().ident or 0
        threading.Timer(
            0.01, lambda: signal.pthread_kill(main, signal.SIGINT)
        ).start()  # wakes it if it waits
    else:
        sys.__unraisablehook__(ignored)
