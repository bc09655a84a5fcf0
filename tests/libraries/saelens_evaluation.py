"""SAELens' evaluation of an SAE in a model: run by the Python of an environment that has sae-lens.

    python saelens_evaluation.py SAE MODEL TOKENS.npy HOOK_LAYER SPECIAL,...

Prints one JSON object. The model is a Hugging Face one behind the few calls of a HookedTransformer that the
evaluation makes.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from sae_lens import SAE
from sae_lens.evals import get_downstream_reconstruction_metrics, get_sparsity_and_variance_metrics
from sae_lens.training.activation_scaler import ActivationScaler
from torch import Tensor
from transformers import AutoModelForCausalLM

folder, model_folder, tokens_file, layer, special = sys.argv[1:]


class Model:
    """A Hugging Face model whose block `layer` output can be read and replaced."""

    def __init__(self) -> None:
        self.hf = AutoModelForCausalLM.from_pretrained(model_folder)

    def __call__(self, tokens: Tensor, return_type: str, loss_per_token: bool) -> tuple[Tensor, Tensor]:
        logits = self.hf(input_ids=tokens).logits
        losses = -logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
        return logits, losses

    def run_with_hooks(self, tokens: Tensor, fwd_hooks: list, **settings: Any) -> tuple[Tensor, Tensor]:
        ((_, replace),) = fwd_hooks
        handle = self.hf.model.layers[int(layer)].register_forward_hook(
            lambda module, args, output: replace(output if isinstance(output, Tensor) else output[0], None))
        try:
            return self(tokens, **settings)
        finally:
            handle.remove()

    def run_with_cache(self, tokens: Tensor, names_filter: list[str], **_: Any) -> tuple[None, dict[str, Tensor]]:
        found: dict[str, Tensor] = {}
        self.run_with_hooks(tokens, [(None, lambda x, _: found.setdefault(names_filter[0], x))],
                            return_type="both", loss_per_token=True)
        return None, found


class Tokens:
    """The one batch there is."""

    def get_batch_tokens(self, _: int) -> Tensor:
        return torch.from_numpy(np.load(tokens_file))


with torch.no_grad():
    shared = {"sae": SAE.load_from_disk(folder), "model": Model(), "activation_store": Tokens(),
              "activation_scaler": ActivationScaler(), "n_batches": 1, "eval_batch_size_prompts": 1,
              "ignore_tokens": [int(token) for token in special.split(",")], "model_kwargs": {}}
    effect = get_downstream_reconstruction_metrics(compute_kl=True, compute_ce_loss=True, **shared)
    quality, _ = get_sparsity_and_variance_metrics(
        compute_l2_norms=False, compute_sparsity_metrics=True, compute_variance_metrics=True,
        compute_featurewise_density_statistics=True, **shared)
print(json.dumps(effect | quality))
