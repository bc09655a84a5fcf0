"""Descent on the encoders of a cross-layer transcoder, and its decoder in closed form, by turns.

    python examples/cross_layer_descent.py 't-*' --model MODEL --growth inf --growth 1 --rounds 2

begins at the runs' encoders and at the decoders of `cross_layer.py` for each --growth. A round is one pass of Adam over
the training rows, which descends on all encoders at once with the decoders fixed,

    sum over layers of ||y_l_hat - y_l||^2 / E||y_l - E y_l||^2

then new thresholds of batchtopk, a pass for the sums, and new decoders. `inf` trains each layer alone, by as many
steps. Nothing is saved; each line is a round's measures on held-out rows, the last with KL and CE.
"""

import sys
from dataclasses import replace

import numpy as np
import torch
from cross_layer import (
    GROWTHS,
    LayerSet,
    line,
    moments_of,
    on_held_out_rows,
    parser_of,
    parts_of,
    spliced,
)
from cross_layer_decoder import Decoders, solve
from torch import Tensor

from saecli.base.console import Console, Silent
from saecli.base.errors import SaeError
from saecli.base.home import Home
from saecli.sae.activations import BatchTopK

BATCH, CALIBRATED = 512, 8192  # rows
WARM_UP = 20  # steps
COLUMNS = ("g", "round", "FVU", "L0", "own fraction", "KL", "CE - clean CE")


class Descent:
    """Adam over all rounds: steps relative to the size of each layer's encoder, warmed up, then falling to 0."""

    def __init__(self, layers: LayerSet, rounds: int, lr: float) -> None:
        self.begun, self.saes = layers, [sae.copy_to(sae.W_enc.device) for sae in layers.saes]
        self.rows, self.done = layers.training, 0
        self.total = rounds * max(1, self.rows.rows // BATCH)
        stride = max(1, self.rows.rows // CALIBRATED)
        sample = [block[::stride].copy() for block in self.rows.sequential(BATCH)]
        rows = torch.from_numpy(np.concatenate(sample))
        self.sample, _ = parts_of(rows, self.saes)  # inputs
        groups = []
        for sae, x in zip(self.saes, self.sample, strict=True):
            size = lr * sae.W_enc.square().mean().sqrt().item()
            groups.append({"params": [sae.W_enc.requires_grad_()], "most": size})
            # A tenth of the change of a pre-activation if all entries of W_enc change by that much in its direction.
            bias = 0.1 * size * x.norm(dim=1).mean().item()
            groups.append({"params": [sae.b_enc.requires_grad_()], "most": bias})
        self.adam = torch.optim.Adam(groups, betas=(0.9, 0.99))

    def descend(self, decoders: Decoders, variances: Tensor, epoch: int) -> None:
        for batch in self.rows.batches(BATCH, seed=1, epoch=epoch):
            inputs, y = parts_of(torch.from_numpy(batch), self.saes)
            codes = [
                sae.activated(sae.pre_activations(x), training=True)
                for sae, x in zip(self.saes, inputs, strict=True)
            ]
            errors = [
                (decoders.predict(layer, codes) - y[:, layer]).square().sum() / variance
                for layer, variance in enumerate(variances.tolist())
            ]
            self.adam.zero_grad()
            (torch.stack(errors).sum() / len(y)).backward()
            factor = min((self.done + 1) / WARM_UP, 1.0) * max(1 - self.done / self.total, 0.0)
            for group in self.adam.param_groups:
                group["lr"] = factor * group["most"]
            self.adam.step()
            self.done += 1

    @torch.no_grad()
    def layers(self) -> LayerSet:
        """The set with these encoders; thresholds of batchtopk as for k active latents on average."""
        runs = []
        for sae, x, run in zip(self.saes, self.sample, self.begun.runs, strict=True):
            tensors = {name: tensor.clone() for name, tensor in sae.tensors().items()}
            if isinstance(sae.activation, BatchTopK):
                pre = sae.pre_activations(x)
                tensors |= sae.activation.calibrated(pre, sae.activation_parameters)
            new = sae.changed(None, **tensors)
            runs.append(replace(run, saved=replace(run.saved, sae=new)))
        return replace(self.begun, runs=runs)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--lr", type=float, default=0.01, help="over the encoder's root mean square"
    )
    options = parser.parse_args()
    console = Console()
    print(line(COLUMNS), line(["---"] * len(COLUMNS)), sep="\n")
    try:
        begun = LayerSet.of(Home.at(options.home), options.runs, console)
        for growth in options.growth or GROWTHS:
            descent = Descent(begun, options.rounds, options.lr)
            for number in range(options.rounds + 1):
                layers = descent.layers()
                moments = moments_of(layers, Silent())
                decoders = solve(moments, growth, options.alpha)
                measured = on_held_out_rows(layers, decoders)
                names = ("fvu", "l0", "own_fraction")
                measures = [float(np.mean(measured[name])) for name in names]
                if number == options.rounds:
                    effect = spliced(layers, decoders, options.model, options.tokens, console)
                    measures += [effect["kl"], effect["ce_spliced"] - effect["ce_clean"]]
                else:
                    descent.descend(decoders, moments.variances, number)
                print(line([f"{growth:g}", str(number), *measures]), flush=True)
    except SaeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
