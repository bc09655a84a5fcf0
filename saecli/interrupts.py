"""What Ctrl-C does, at any moment of a command: status 130, and one sentence on what was kept.

Needs nothing but the standard library, since it is in place before anything else is loaded.
"""

import os
import signal
import sys
import threading

from .torchrun import rank

TYPE_CHECKING = False  # typing takes a while to import, in which Ctrl-C would still be Python's
if TYPE_CHECKING:
    from typing import Any

STATUS = 130
NOT_BEGUN = "stopped before it began; nothing was changed"


_came = False


def watch() -> None:
    """End at once by Ctrl-C: an exception would leave libraries half loaded, which some turn into another. Where Ctrl-C
    is ignored, as by `nohup`, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
        sys.unraisablehook = _pass_on


def begin() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt: the command says what it kept."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, _interrupt)


def end() -> None:
    """From here on Ctrl-C does nothing: the status is settled. Python would make it end the process by the signal."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def came() -> bool:
    """Whether Ctrl-C came while the command ran, whatever a library made of it."""
    return _came


def _leave(number: int, frame: "Any") -> None:
    if rank() == 0:
        os.write(2, f"{NOT_BEGUN}\n".encode())
    os._exit(STATUS)


def _interrupt(number: int, frame: "Any") -> None:
    global _came
    _came = True
    raise KeyboardInterrupt


def _pass_on(ignored: "Any") -> None:
    """Interrupt the command anew, once the callback is over that an interrupt fell into: Python would print it and go
    on."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        main = threading.main_thread().ident
        threading.Timer(0.01, lambda: signal.pthread_kill(main, signal.SIGINT)).start()  # wakes it, where it waits
    else:
        sys.__unraisablehook__(ignored)
