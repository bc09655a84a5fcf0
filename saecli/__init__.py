"""saecli: sparse autoencoders from a language model's activations, trained, evaluated and understood.

    store = saecli.extract("tiny-gemma2", layer=2, rows=20_000)    # or saecli.open_store("notes")
    sae = saecli.fit(store, solver="pam-sgd", act="topk", k=32)
    z = sae.encode(x)                     # raw activations (rows, d_in) to codes (rows, d_sae)
    x_hat = sae.decode(z)
    saecli.save_sae(sae, "folder")        # saecli.load_sae("folder") reads it again

Names are imported when they are first used, so that `import saecli` takes no time.
"""

import importlib
import os

# Threads that wait for the next product sleep, and do not spin, unless the user has said how: beside other work
# spinning takes half of a training's processor time or more (tests/benchmarks/waiting_threads.py). OpenMP reads it as
# torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

TYPE_CHECKING = False  # to a type checker it is true: it knows these names, and no others
if TYPE_CHECKING:
    from typing import Any

    from .api import fit, load_sae, open_store, save_sae
    from .errors import SaeError
    from .harvest import extract
    from .sae import SAE
    from .store import ActivationStore

__version__ = "0.1.0"
__all__ = ["SAE", "ActivationStore", "SaeError", "extract", "fit", "load_sae", "open_store", "save_sae"]

_MODULES = {"SAE": "sae", "ActivationStore": "store", "SaeError": "errors", "extract": "harvest"}

if not TYPE_CHECKING:
    def __getattr__(name: str) -> "Any":
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{_MODULES.get(name, 'api')}", __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
