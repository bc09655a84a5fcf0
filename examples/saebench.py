"""SAEBench on an SAE of this tool, or on any other that it opens.

    pip install sae-bench && pip install --no-deps .          # in an environment of its own
    python examples/saebench.py first --model pythia-160m-deduped --eval core --eval sparse_probing

SAE: a run's name, a folder in any known format, or an address on the hub. --model is TransformerLens' name of the model
that its rows came from. SAEBench's own options, such as numbers of batches, keep their defaults; results are written
into ./eval_results. SAEBench needs a reconstruction of one hook point, and unit decoder vectors: their norms go into
the codes here, which leaves reconstructions as they are.
"""

import argparse
from pathlib import Path

import torch
from sae_bench.custom_saes import run_all_evals_custom_saes as runner
from sae_bench.custom_saes.base_sae import BaseSAE
from torch import Tensor

import saecli
from saecli.sae.dictionary import SAE
from saecli.sae.formats.common import hook_name
from saecli.store.origin import HookPoint

SITES = ("resid_post", "resid_pre", "attn_out", "mlp_out")  # in all of TransformerLens' models
LLM_BATCH = 32
EVALS = [name for name in runner.output_folders if name not in ("autointerp", "unlearning")]


class Benched(BaseSAE):
    """An SAE with unit decoder vectors, as SAEBench takes it.

    z = encode(x) ||W_dec||,    x_hat = z W_dec / ||W_dec|| + b_dec
    """

    def __init__(self, sae: SAE, model: str, device: str, dtype: torch.dtype) -> None:
        site, target = sae.cfg.get("site"), sae.cfg.get("target_site")
        if site not in SITES or target is not None or sae.widths:
            raise SystemExit(
                f"SAEBench takes an SAE that reconstructs one hook point: expected one of {', '.join(SITES)}, got "
                f"{'several' if sae.widths else site}{f' -> {target}' if target else ''}; name another run"
            )
        point = HookPoint(sae.cfg["layer"], site)
        sizes = sae.d_in, sae.d_sae, model, point.layer
        super().__init__(*sizes, torch.device(device), dtype, hook_name(point))
        self.sae = sae.copy_to(torch.device(device))
        norms = self.sae.W_dec.norm(dim=1)
        unit = self.sae.W_dec / norms.clamp(min=torch.finfo(norms.dtype).tiny)[:, None]
        unit[norms == 0, 0] = 1  # of a latent that adds nothing
        self.norms = norms
        for own, tensor in (
            (self.W_enc, self.sae.W_enc * norms),
            (self.b_enc, self.sae.b_enc * norms),
            (self.W_dec, unit),
            (self.b_dec, self.sae.b_dec),
        ):
            own.data.copy_(tensor)
        self.cfg.architecture = sae.activation.name
        self.cfg.context_size = sae.cfg.get("context")

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        return (self.sae.encode(x.to(self.sae.W_enc)) * self.norms).to(x.dtype)

    def decode(self, feature_acts: Tensor) -> Tensor:
        return feature_acts @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sae", nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--eval", action="append", choices=EVALS, help="default: core")
    parser.add_argument("--home", help="of the runs; default: $SAE_HOME, else ./sae-data")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    saes = []
    for name in options.sae:
        sae = Benched(saecli.load_sae(name, options.home), options.model, device, dtype)
        if not sae.check_decoder_norms():
            raise SystemExit(f"{name}: decoder vectors are not of norm 1 in {options.dtype}")
        sae.cfg.dtype = options.dtype
        saes.append((Path(name).name, sae))
    runner.MODEL_CONFIGS.setdefault(options.model, {})  # else it refuses other models than its two
    runner.run_evals(
        options.model, saes, LLM_BATCH, options.dtype, device, options.eval or ["core"]
    )


if __name__ == "__main__":
    main()
