"""What the tests of fine-tuning share: a text whose training windows make one step, and the loss by plain torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_hooks import all_replaced, but_first
from tiny_models import random_letters
from torch import Tensor
from transformers import LlamaForCausalLM

import saecli
from saecli.sae.dictionary import SAE
from saecli.store.split import Split
from saecli.train.options import TRAINED

LENGTH, WINDOWS = 15, 205  # windows that make one step, without those held out


def written_texts(path: Path) -> dict[str, Any]:
    """The options of an extraction from a file of texts of a window each, `WINDOWS` of which are trained on."""
    draw, texts, training = np.random.default_rng(0), [], 0
    while training < WINDOWS:
        training += Split("train", TRAINED, seed=0).keeps(np.array([len(texts)]))[0]
        texts.append(random_letters(draw, LENGTH))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"dataset": str(path), "context": LENGTH + 1, "dtype": "float32"}


def joint_loss(
    model: Path, saes: dict[str, SAE], store: saecli.ActivationStore, weight: float
) -> tuple[float, list[Tensor]]:
    """KL of all SAEs at once plus the weighted mean of their FVU on clean rows, in float64, and its gradient in each
    decoder; they are by the module whose output each replaces, from its input if it is an MLP."""
    windows = store.split("train", fraction=TRAINED).windows()
    ids = torch.tensor([token_ids.tolist() for token_ids, _ in windows])
    llama = LlamaForCausalLM.from_pretrained(model).double()
    modules = [llama.get_submodule(path) for path in saes]
    from_input = [path.endswith("mlp") for path in saes]
    exact = [sae.copy_to(torch.float64) for sae in saes.values()]
    for sae in exact:
        sae.W_dec.requires_grad_()

    def spliced(number: int, x: Tensor, y: Tensor) -> Tensor:
        return but_first(y, exact[number](x if from_input[number] else y))

    with all_replaced(modules, lambda number, x, y: y) as clean:
        wanted = llama(input_ids=ids).logits.log_softmax(-1).detach()
    with all_replaced(modules, spliced):
        got = llama(input_ids=ids).logits.log_softmax(-1)
    kl = (wanted.exp() * (wanted - got)).sum(-1)[:, 1:].mean()
    errors = []
    for number, (x, y, _) in enumerate(clean):
        rows = y[:, 1:].flatten(0, 1).detach()
        error = (spliced(number, x.detach(), y.detach()) - y.detach()).square().sum()
        errors.append(error / (rows - rows.mean(0)).square().sum())
    loss = kl + weight * torch.stack(errors).mean()
    return loss.item(), list(torch.autograd.grad(loss, [sae.W_dec for sae in exact]))
