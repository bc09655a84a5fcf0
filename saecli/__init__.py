"""saecli: train, evaluate and understand sparse autoencoders on a language model's activations.

    store = saecli.extract("tiny-gemma2", layer=2, rows=20_000)    # or saecli.open_store("notes")
    sae = saecli.fit(store, solver="pam-sgd", act="topk", k=32)
    z = sae.encode(x)                     # raw activations (rows, d_in) to codes (rows, d_sae)
    x_hat = sae.decode(z)
    saecli.save_sae(sae, "folder")        # saecli.load_sae("folder") reads it again
    saecli.evaluate(sae, store)           # {"fvu": ..., "l0": ...}, on the held-out rows
    saecli.draw("sparsity", sae, data=store)  # figures, for a notebook with %matplotlib inline

Names are imported on first use, so that `import saecli` is fast.
"""

import importlib as _importlib
import os as _os
import sys as _sys
from types import ModuleType as _ModuleType

# Waiting OpenMP threads sleep rather than spin, unless the user has set this: beside other work, spinning takes half of
# a training's CPU time or more (tests/benchmarks/README.md). OpenMP reads it when torch is loaded.
_os.environ.setdefault("OMP_WAIT_POLICY", "passive")

TYPE_CHECKING = False  # true to a type checker, which then knows exactly these names
if TYPE_CHECKING:
    from typing import Any

    from .base.errors import SaeError
    from .extract.extraction import extract
    from .geometry.geometry import geometry
    from .measure.controls import controls
    from .measure.evaluate import compare, evaluate, sparsity
    from .measure.export import export, push
    from .measure.probes import probe
    from .measure.refit import refit
    from .measure.stability import stability
    from .measure.steer import steer, steering
    from .sae.dictionary import SAE
    from .sae.library import load_sae, save_sae
    from .show.drawing import draw
    from .show.report import report
    from .store.importing import import_array, import_synthetic
    from .store.opening import list_home
    from .store.reader import ActivationStore
    from .train.finetune import finetune
    from .train.fit import fit, join, open_store

__version__ = "0.1.0"
_NAMES = {  # by module
    "base.errors": ["SaeError"],
    "extract.extraction": ["extract"],
    "geometry.geometry": ["geometry"],
    "measure.controls": ["controls"],
    "measure.evaluate": ["compare", "evaluate", "sparsity"],
    "measure.export": ["export", "push"],
    "measure.probes": ["probe"],
    "measure.refit": ["refit"],
    "measure.stability": ["stability"],
    "measure.steer": ["steer", "steering"],
    "sae.dictionary": ["SAE"],
    "sae.library": ["load_sae", "save_sae"],
    "show.drawing": ["draw"],
    "show.report": ["report"],
    "store.importing": ["import_array", "import_synthetic"],
    "store.opening": ["list_home"],
    "store.reader": ["ActivationStore"],
    "train.finetune": ["finetune"],
    "train.fit": ["fit", "join", "open_store"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [
    "SAE",
    "ActivationStore",
    "SaeError",
    "compare",
    "controls",
    "draw",
    "evaluate",
    "export",
    "extract",
    "finetune",
    "fit",
    "geometry",
    "import_array",
    "import_synthetic",
    "join",
    "list_home",
    "load_sae",
    "open_store",
    "probe",
    "push",
    "refit",
    "report",
    "save_sae",
    "sparsity",
    "stability",
    "steer",
    "steering",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> "Any":
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(_ModuleType):
    """Keeps `saecli.extract` and `saecli.geometry` functions, where importing their rooms would bind them."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, _ModuleType) and name in _MODULES):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package
