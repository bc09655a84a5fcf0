"""saecli: train, evaluate and understand sparse autoencoders on a language model's activations.

    store = saecli.extract("tiny-gemma2", layer=2, rows=20_000)    # or saecli.open_store("notes")
    sae = saecli.fit(store, solver="pam-sgd", act="topk", k=32)
    z = sae.encode(x)                     # raw activations (rows, d_in) to codes (rows, d_sae)
    x_hat = sae.decode(z)
    saecli.save_sae(sae, "folder")        # saecli.load_sae("folder") reads it again
    saecli.evaluate(sae, store)           # {"fvu": ..., "l0": ...}, on the held-out rows
    saecli.draw("sparsity", sae, data=store)  # figures, which a notebook shows

Names are imported on first use, so that `import saecli` is fast.
"""

import importlib as _importlib
import os as _os

# Waiting OpenMP threads sleep rather than spin, unless the user has set this: beside other work, spinning takes half of
# a training's CPU time or more (tests/benchmarks/README.md). OpenMP reads it when torch is loaded.
_os.environ.setdefault("OMP_WAIT_POLICY", "passive")

TYPE_CHECKING = False  # true to a type checker, which then knows exactly these names
if TYPE_CHECKING:
    from typing import Any

    from .api import fit, join, load_sae, open_store, save_sae
    from .baselines.controls import controls
    from .dictionary import SAE
    from .drawing import draw
    from .errors import SaeError
    from .evaluation.evaluate import compare, evaluate, sparsity
    from .evaluation.stability import stability
    from .harvest import extract
    from .html_report.report import report
    from .interventions.generation import steer
    from .interventions.steering import steering
    from .inventory.importing import import_array
    from .inventory.listing import list_home
    from .inventory.synthetic import import_synthetic
    from .probing.probe import probe
    from .publishing.export import export
    from .publishing.push import push
    from .refitting.refit import refit
    from .spline_measures.geometry import geometry
    from .store import ActivationStore

__version__ = "0.1.0"
__all__ = ["SAE", "ActivationStore", "SaeError", "compare", "controls", "draw", "evaluate", "export", "extract", "fit",
           "geometry", "import_array", "import_synthetic", "join", "list_home", "load_sae", "open_store", "probe",
           "push", "refit", "report", "save_sae", "sparsity", "stability", "steer",
           "steering"]

_MODULES = {
    "SAE": "dictionary",
    "ActivationStore": "store",
    "SaeError": "errors",
    "compare": "evaluation.evaluate",
    "controls": "baselines.controls",
    "draw": "drawing",
    "evaluate": "evaluation.evaluate",
    "export": "publishing.export",
    "extract": "harvest",
    "geometry": "spline_measures.geometry",
    "import_array": "inventory.importing",
    "import_synthetic": "inventory.synthetic",
    "list_home": "inventory.listing",
    "probe": "probing.probe",
    "push": "publishing.push",
    "refit": "refitting.refit",
    "report": "html_report.report",
    "sparsity": "evaluation.evaluate",
    "stability": "evaluation.stability",
    "steer": "interventions.generation",
    "steering": "interventions.steering",
}

if not TYPE_CHECKING:
    def __getattr__(name: str) -> "Any":
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_importlib.import_module(f".{_MODULES.get(name, 'api')}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
