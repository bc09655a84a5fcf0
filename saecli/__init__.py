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
from functools import wraps as _wraps

try:
    import fcntl as _fcntl  # noqa: F401
except ImportError:
    _refusal = f"saecli needs Linux, macOS or another POSIX system, got {_sys.platform}; on Windows, install it in WSL"
    if _os.path.splitext(_os.path.basename(_sys.argv[0]))[0] in ("sae", "-m"):
        _sys.exit(f"sae: {_refusal}")  # the command's one sentence
    raise ImportError(_refusal) from None

# Waiting OpenMP threads sleep rather than spin, unless the user has set this: beside other work, spinning takes half of
# a training's CPU time or more (tests/benchmarks/README.md). OpenMP reads it when torch is loaded.
_os.environ.setdefault("OMP_WAIT_POLICY", "passive")

TYPE_CHECKING = False  # true to a type checker, which then knows exactly these names
if TYPE_CHECKING:
    from .base.errors import SaeError as SaeError
    from .derive.functions import export as export
    from .derive.functions import push as push
    from .derive.functions import refit as refit
    from .extract.extraction import extract as extract
    from .geometry.functions import geometry as geometry
    from .measure.claims import contrast as contrast
    from .measure.claims import effects as effects
    from .measure.functions import controls as controls
    from .measure.functions import evaluate as evaluate
    from .measure.functions import explain as explain
    from .measure.functions import probe as probe
    from .measure.functions import read as read
    from .measure.functions import sparsity as sparsity
    from .measure.functions import steer as steer
    from .measure.stability import stability as stability
    from .measure.steer import steering as steering
    from .model.saes import load_sae as load_sae
    from .sae.dictionary import SAE as SAE
    from .sae.library import save_sae as save_sae
    from .show.drawing import draw as draw
    from .show.functions import report as report
    from .show.functions import serve as serve
    from .splice.spliced import spliced as spliced
    from .store.importing import import_array as import_array
    from .store.importing import import_synthetic as import_synthetic
    from .store.reader import ActivationStore as ActivationStore
    from .train.finetune import finetune as finetune
    from .train.fit import fit as fit
    from .train.fit import join as join
    from .train.fit import open_store as open_store
    from .train.listing import list_home as list_home
else:
    # Importing a submodule for the first time binds its name here. These two have the names of functions, and are
    # imported now, so that the names are free from here on.
    from . import extract, geometry

    del extract, geometry

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(_importlib.import_module(f".{_MODULES[name]}", __name__), name)
        if isinstance(value, type):
            return value

        @_wraps(value)
        def function(*args, **kwargs):
            if "torch" not in _sys.modules:  # whose settings are as it starts then
                return value(*args, **kwargs)
            from .base.devices import as_usual

            return as_usual(value)(*args, **kwargs)

        function.__module__ = __name__  # where pickle finds it
        globals()[name] = function
        return function


__version__ = "0.1.0"
_NAMES = {  # by module
    "base.errors": ["SaeError"],
    "derive.functions": ["export", "push", "refit"],
    "extract.extraction": ["extract"],
    "geometry.functions": ["geometry"],
    "measure.claims": ["contrast", "effects"],
    "measure.functions": ["controls", "evaluate", "explain", "probe", "read", "sparsity", "steer"],
    "measure.stability": ["stability"],
    "measure.steer": ["steering"],
    "sae.dictionary": ["SAE"],
    "model.saes": ["load_sae"],
    "sae.library": ["save_sae"],
    "show.drawing": ["draw"],
    "show.functions": ["report", "serve"],
    "splice.spliced": ["spliced"],
    "store.importing": ["import_array", "import_synthetic"],
    "store.reader": ["ActivationStore"],
    "train.finetune": ["finetune"],
    "train.fit": ["fit", "join", "open_store"],
    "train.listing": ["list_home"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_MODULES]


def __dir__() -> list[str]:
    return sorted(__all__)
