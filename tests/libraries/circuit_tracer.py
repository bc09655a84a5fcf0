"""circuit-tracer's side of the format tests: run by the Python of an environment that has circuit-tracer.

    python circuit_tracer.py FOLDER

Reads FOLDER/ours/CASE, makes FOLDER/theirs/CASE, and writes each one's codes of FOLDER/rows.npy and its layer 0's
predictions to CASE.npz. 0.5.0 does not read `activation: topk` of config.yaml: its own TopK is put in.
"""

import sys
from pathlib import Path

sys.path.pop(0)  # this file's folder, where the library's name would be this file

import numpy as np
import torch
from circuit_tracer.transcoder import SingleLayerTranscoder, TranscoderSet
from circuit_tracer.transcoder.activation_functions import JumpReLU, TopK
from circuit_tracer.utils.caching import load_transcoders_from_cache

D, F = 24, 60
CONFIG = """model_name: gpt2
model_kind: transcoder_set
feature_input_hook: mlp.hook_in
feature_output_hook: hook_mlp_out
scan: scan
revision: null
"""


def record(folder: Path, rows: torch.Tensor) -> None:
    """Keeps codes and predictions of the rows."""
    transcoders, config = load_transcoders_from_cache(
        folder.name, cache_dir=folder.parent, lazy_decoder=False
    )
    assert config["feature_input_hook"] == "mlp.hook_in"
    assert config["feature_output_hook"] == "hook_mlp_out"
    for transcoder in transcoders:
        if config.get("activation") == "topk":
            transcoder.activation_function = TopK(config["k"])
    codes = transcoders.encode(rows.expand(len(transcoders), -1, -1)).numpy()
    x_hat = transcoders[0](rows).numpy()
    np.savez(folder.with_suffix(".npz"), codes=codes[0], codes_of_all=codes, x_hat=x_hat)


@torch.no_grad()
def main() -> None:
    """Reads ours, makes theirs."""
    folder = Path(sys.argv[1])
    rows = torch.from_numpy(np.load(folder / "rows.npy"))
    for path in sorted((folder / "ours").iterdir()):
        record(path, rows)
    torch.manual_seed(0)
    for skip in (False, True):
        for name, act in {
            "relu": torch.nn.functional.relu,
            "jumprelu": JumpReLU(torch.rand(F) * 4, 0.1),
        }.items():
            path = folder / "theirs" / f"{name}{'-skip' if skip else ''}"
            settings = {"skip_connection": skip, "dtype": torch.float32}
            transcoder = SingleLayerTranscoder(D, F, act, 0, **settings)
            for key, parameter in transcoder.named_parameters():
                if "threshold" not in key:
                    parameter.normal_()
            made = TranscoderSet({0: transcoder}, "mlp.hook_in", "hook_mlp_out", "scan")
            made.to_safetensors(str(path))
            (path / "config.yaml").write_text(CONFIG)
            record(path, rows)


main()
