"""SAELens' side of the format tests: run by the Python of an environment that has sae-lens.

    python saelens.py FOLDER

FOLDER/ours/CASE holds SAEs that saecli wrote; each reconstruction of FOLDER/rows.npy goes to FOLDER/ours/CASE.npz.
FOLDER/theirs/CASE receives SAEs that SAELens makes, with their reconstructions beside them.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from sae_lens import SAE
from sae_lens.saes import (
    AbsTopKSAE,
    AbsTopKSAEConfig,
    JumpReLUSAE,
    JumpReLUSAEConfig,
    JumpReLUSkipTranscoder,
    JumpReLUSkipTranscoderConfig,
    JumpReLUTranscoder,
    JumpReLUTranscoderConfig,
    SkipTranscoder,
    SkipTranscoderConfig,
    StandardSAE,
    StandardSAEConfig,
    TopKSAE,
    TopKSAEConfig,
    Transcoder,
    TranscoderConfig,
)
from safetensors.torch import save_file

D, E, F, K = 24, 17, 60, 6

MADE = {
    "standard": (StandardSAE, StandardSAEConfig, {}),
    "standard-subtracting": (StandardSAE, StandardSAEConfig, {"apply_b_dec_to_input": True}),
    "jumprelu": (JumpReLUSAE, JumpReLUSAEConfig, {"apply_b_dec_to_input": True}),
    "topk": (TopKSAE, TopKSAEConfig, {"k": K}),
    "topk-rescaled": (TopKSAE, TopKSAEConfig, {
        "k": K, "rescale_acts_by_decoder_norm": True, "apply_b_dec_to_input": True}),
    "abstopk": (AbsTopKSAE, AbsTopKSAEConfig, {"k": K}),
    "transcoder": (Transcoder, TranscoderConfig, {"d_out": E}),
    "skip-transcoder": (SkipTranscoder, SkipTranscoderConfig, {"d_out": E}),
    "jumprelu-transcoder": (JumpReLUTranscoder, JumpReLUTranscoderConfig, {"d_out": E}),
    "jumprelu-skip-transcoder": (JumpReLUSkipTranscoder, JumpReLUSkipTranscoderConfig, {"d_out": D}),
}

OLD = {  # what versions before 6 wrote, by the case above whose weights it is said of
    "standard": {"activation_fn_str": "relu", "apply_b_dec_to_input": False, "normalize_activations": False,
                 "hook_point": "blocks.8.hook_resid_pre", "model_name": "gpt2-small"},
    "standard-subtracting": {"architecture": "standard", "activation_fn_str": "relu", "normalize_activations": "none"},
    "jumprelu": {"architecture": "jumprelu", "activation_fn": "relu", "sae_lens_training_version": "3.0.0"},
    "topk": {"architecture": "standard", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": K},
             "apply_b_dec_to_input": False, "normalize_activations": None},
}


def record(sae: SAE, rows: torch.Tensor, path: Path) -> None:
    """Keeps codes and reconstructions of the rows."""
    codes = sae.encode(rows)
    np.savez(path, codes=codes.numpy(), x_hat=sae(rows).numpy())


@torch.no_grad()
def main() -> None:
    """Reads ours, makes theirs."""
    folder = Path(sys.argv[1])
    rows = torch.from_numpy(np.load(folder / "rows.npy"))
    for path in sorted((folder / "ours").iterdir()):
        record(SAE.load_from_disk(path), rows, path.with_suffix(".npz"))
    torch.manual_seed(0)
    for case, (kind, config, settings) in MADE.items():
        sae = kind(config(d_in=D, d_sae=F, **({"apply_b_dec_to_input": False} | settings)))
        for name, parameter in sae.named_parameters():
            parameter.data.normal_()
            if name == "threshold":
                parameter.data.abs_()
        sae.save_model(folder / "theirs" / case)
        record(sae, rows, folder / "theirs" / f"{case}.npz")
        if case in OLD:
            path = folder / "theirs" / f"{case}-old"
            path.mkdir()
            scaling = {} if case == "jumprelu" else {"scaling_factor": torch.ones(F)}
            save_file(sae.state_dict() | scaling, path / "sae_weights.safetensors")
            (path / "cfg.json").write_text(json.dumps({"d_in": D, "d_sae": F, "dtype": "torch.float32"} | OLD[case]))
            record(SAE.load_from_disk(path), rows, path.with_suffix(".npz"))


main()
