"""A cross-layer transcoder from a set of transcoders: their encoders, and the decoder of all layers in closed form.

    sae extract --model MODEL --layer all --site mlp_in --site mlp_out --name m
    sae train --data 'm-l*-mlp_in' --target 'm-l*-mlp_out' --each --act batchtopk --k 16 --name t
    python examples/cross_layer.py 't-*' --model MODEL --growth inf --growth 3 --growth 1

The output of each MLP is predicted from the codes of its own layer and of all before it (Ameisen et al., "Circuit
Tracing", 2025). The encoders, hence codes and L0, stay those of the runs; `cross_layer_decoder.py` solves for the
decoders. A table compares the runs' own decoders with those for each --growth of the ridge with distance, on held-out
rows; `inf` is each layer alone, as `sae refit` solves. KL and CE are those of `sae eval --together`: all layers are
spliced in at once, with codes of that pass.

    python examples/cross_layer.py 't-*' --model MODEL --growth 1 --out clt

also writes a folder that circuit-tracer (0.5.0) opens: `W_enc_L.safetensors`, `W_dec_L.safetensors`, config.yaml.

B rows, L layers, F = d_sae, D = d_in, E = d_out of a layer.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from cross_layer_decoder import Decoders, Moments, solve
from torch import Tensor

from saecli.base.console import Console, Listener
from saecli.base.devices import batches_on
from saecli.base.errors import ConfigError, FormatError, SaeError
from saecli.base.files import folder_appearing_whole, is_free
from saecli.base.home import Home
from saecli.measure.evaluate import check_model, together
from saecli.measure.measured import ChosenRows, Measured
from saecli.sae.activations import Relu
from saecli.sae.activations.base import Thresholded
from saecli.sae.codes import Codes
from saecli.sae.dictionary import SAE
from saecli.sae.formats import common
from saecli.sae.formats.circuit_tracer import CONFIG, demand_set, in_common
from saecli.sae.metrics import Reconstruction
from saecli.splice.placement import placement
from saecli.store.opening import Joined
from saecli.store.reader import RowSource

BLOCK_ROWS = 2048
GROWTHS = [float("inf"), 1.0]
ENCODER = {"W_enc": "W_enc.T", "b_enc": "b_enc"} | common.THRESHOLD  # in circuit-tracer's files
COLUMNS = ("decoder", "alpha", "FVU", "own fraction", "KL", "CE - clean CE", "processor seconds")


@dataclass(frozen=True)
class LayerSet:
    """Transcoders of several layers of one model, in order, on the same tokens."""

    runs: list[Measured]
    training: RowSource  # inputs of all layers side by side, then targets of all
    held_out: RowSource

    @classmethod
    def of(cls, home: Home, names: Sequence[str], listener: Listener) -> "LayerSet":
        """ConfigError unless they are runs of `sae train --each --target` on one text."""
        chosen = ChosenRows(home, None, "test", "auto", listener)
        runs = [chosen.with_sae(name) for name in home.runs.matching(names)]
        runs.sort(key=_layer_of)
        _demand_one_set(runs)
        targets = [run.stores.target for run in runs]
        stores = Joined((*(run.store for run in runs), *(store for store in targets if store)))
        stores.demand_alike()
        seed = runs[0].subject.split_seed
        return cls(runs, stores.split("train", seed=seed), stores.split("test", seed=seed))

    @property
    def saes(self) -> list[SAE]:
        return [run.sae for run in self.runs]

    def blocks(self, rows: RowSource) -> Iterator[tuple[list[Codes], Tensor]]:
        """In stored order, codes of each layer and targets, (B, L, E)."""
        for batch in batches_on(rows.sequential(BLOCK_ROWS), self.saes[0].W_enc.device):
            inputs, y = parts_of(batch, self.saes)
            yield [sae.codes(x) for sae, x in zip(self.saes, inputs, strict=True)], y

    def of_targets(self, values: np.ndarray) -> Tensor:
        """Those of the targets' dimensions, (L, E), of a value for each dimension of the rows."""
        d_targets = len(self.runs) * self.saes[0].d_out
        targets = torch.from_numpy(values[-d_targets:]).to(self.saes[0].W_enc.device)
        return targets.view(len(self.runs), -1)


def parts_of(batch: Tensor, saes: Sequence[SAE]) -> tuple[list[Tensor], Tensor]:
    """Inputs, (B, D) each, and targets, (B, L, E), of rows side by side."""
    widths = [sae.d_in for sae in saes] + [len(saes) * saes[0].d_out]
    *inputs, y = batch.to(saes[0].W_enc).split(widths, 1)
    return [x.contiguous() for x in inputs], y.unflatten(1, (len(saes), -1))


def _layer_of(run: Measured) -> int:
    at = placement((run.subject, run.saved), None, None)
    layer = at.read.layer
    if not run.saved.is_transcoder or layer is None or layer != at.written.layer:
        raise ConfigError(
            f"{run.subject.name} is no transcoder of one layer: expected runs of `sae train --each --target`, got one "
            f"from {at.read} to {at.written}; leave it out"
        )
    return layer


def _demand_one_set(runs: Sequence[Measured]) -> None:
    first, names = runs[0], dict[int, str]()
    for run in runs:
        layer, name = _layer_of(run), run.subject.name
        if layer in names:
            raise ConfigError(
                f"{names[layer]} and {name} are both of layer {layer}: expected one run for each layer; narrow the "
                "pattern"
            )
        names[layer] = name
        if run.sae.W_skip is not None:
            raise ConfigError(
                f"{name} has a skip: expected transcoders that predict from codes alone; train without --skip"
            )
        for what, expected, got in (
            ("model", first.saved.origin.spec, run.saved.origin.spec),
            ("width of targets", first.sae.d_out, run.sae.d_out),
            ("split seed", first.subject.split_seed, run.subject.split_seed),
        ):
            if got != expected:
                raise ConfigError(
                    f"{first.subject.name} and {name} are not of one set: expected the same {what}, got {expected} "
                    f"and {got}; name runs of one `sae train --each`"
                )


def own_decoders(layers: LayerSet) -> Decoders:
    weights = [{layer: sae.W_dec} for layer, sae in enumerate(layers.saes)]
    return Decoders(weights, [sae.b_dec for sae in layers.saes])


@torch.no_grad()
def moments_of(layers: LayerSet, listener: Listener) -> Moments:
    """By one pass over the training rows."""
    rows, spread = layers.training, layers.training.spread()
    mean, scatter = layers.of_targets(spread.mean), layers.of_targets(spread.scatter)
    moments = Moments([sae.d_sae for sae in layers.saes], mean, scatter, rows.rows)
    done = 0
    with listener.progress("summing over all layers", rows.rows, "rows") as show:
        for codes, y in layers.blocks(rows):
            moments.add(codes, y)
            done += len(y)
            show(done)
    return moments


@torch.no_grad()
def on_held_out_rows(layers: LayerSet, decoders: Decoders) -> dict[str, Any]:
    """For each layer FVU, L0, and the fraction of the explained variance that its own codes explain,
    `cov(z_l W[l->l], y_l) / cov(y_l_hat, y_l)`, covariances summed over dimensions."""
    saes, mean = layers.saes, layers.of_targets(layers.held_out.spread().mean)
    errors = [Reconstruction(sae.d_out, sae.d_sae, device=mean.device) for sae in saes]
    explained = torch.zeros(2, len(saes), dtype=torch.float64, device=mean.device)
    for codes, y in layers.blocks(layers.held_out):
        for layer, error in enumerate(errors):
            y_hat = decoders.predict(layer, codes)
            error.update(y[:, layer], y_hat, codes[layer])
            own = codes[layer].times(decoders.weights[layer][layer])
            about_mean = y[:, layer] - mean[layer]
            for number, part in enumerate((own, y_hat)):
                explained[number, layer] += (part.double() * about_mean).sum()
    results = [error.result() for error in errors]
    measures = {name: [result[name] for result in results] for name in ("fvu", "l0")}
    return measures | {"own_fraction": (explained[0] / explained[1]).tolist()}


class Spliced(SAE):
    """One layer's encoder, whose prediction takes the codes of all layers up to it, of the same forward pass."""

    def __init__(
        self, sae: SAE, layer: int, decoders: Decoders, codes_of_pass: dict[int, Codes]
    ) -> None:
        W_dec, b_dec = decoders.weights[layer][layer], decoders.biases[layer]
        parameters = sae.activation_parameters
        super().__init__(sae.W_enc, sae.b_enc, W_dec, b_dec, sae.activation, parameters)
        self.layer, self.decoders, self.codes_of_pass = layer, decoders, codes_of_pass

    def predicted(self, x: Tensor, codes: Codes) -> Tensor:
        self.codes_of_pass[self.layer] = codes  # layers come in order
        return self.decoders.predict(self.layer, self.codes_of_pass)[:, None]


def spliced(
    layers: LayerSet, decoders: Decoders, model: str, tokens: int, listener: Listener
) -> dict[str, Any]:
    """As `sae eval --together`, with these decoders."""
    codes_of_pass: dict[int, Codes] = {}
    runs = []
    for layer, run in enumerate(layers.runs):
        sae = Spliced(run.sae, layer, decoders, codes_of_pass)
        runs.append(replace(run, saved=replace(run.saved, sae=sae)))
    return together(runs, model, tokens, listener)


def demand_exportable(layers: LayerSet) -> None:
    """FormatError unless circuit-tracer opens them as one cross-layer transcoder."""
    demand_set([(_layer_of(run), in_common(run.saved)) for run in layers.runs])
    for run in layers.runs:
        act = run.sae.activation
        if not isinstance(act, Relu | Thresholded):
            raise FormatError(
                f"circuit-tracer's cross-layer transcoders have relu or thresholds, {run.subject.name} has {act.name}; "
                "train with --act batchtopk, jumprelu or relu"
            )


def export(layers: LayerSet, decoders: Decoders, folder: Path) -> None:
    """Write circuit-tracer's folder; see `load_clt` of its `transcoder/cross_layer_transcoder.py`."""
    shared = in_common(layers.runs[0].saved)
    named = ("model_name", "feature_input_hook", "feature_output_hook")
    config = {"model_kind": "cross_layer_transcoder"}
    config |= {name: shared[name] for name in named if shared.get(name) is not None}
    with folder_appearing_whole(folder) as temporary:
        (temporary / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))
        for layer, sae in enumerate(layers.saes):
            tensors = common.disassembled(sae, ENCODER) | {"b_dec": decoders.biases[layer]}
            tensors = {f"{name}_{layer}": tensor for name, tensor in tensors.items()}
            common.write_tensors(temporary / f"W_enc_{layer}.safetensors", tensors)
            # (F, L - i, E)
            W_dec = torch.stack([own[layer] for own in decoders.weights[layer:]], 1)
            path = temporary / f"W_dec_{layer}.safetensors"
            common.write_tensors(path, {f"W_dec_{layer}": W_dec})


def compare(options: argparse.Namespace, listener: Listener) -> Iterator[dict[str, Any]]:
    """The measures of the runs' own decoders, and of those for each growth; the last are written to --out."""
    if options.out and (options.growth[-1] == float("inf") or not is_free(options.out)):
        raise ConfigError(
            "--out takes decoders across layers and a new or empty folder: expected a finite last --growth, got "
            f"{options.growth[-1]:g} and {options.out}; give another"
        )
    layers = LayerSet.of(Home.at(options.home), options.runs, listener)
    for run in layers.runs:
        check_model(run, options.model)
    if options.out:
        demand_exportable(layers)
    kinds = {"own": own_decoders(layers)}
    moments = moments_of(layers, listener)
    for growth in options.growth:
        kinds[f"g = {growth:g}"] = solve(moments, growth, options.alpha)
    if options.out:
        export(layers, [*kinds.values()][-1], options.out)
    del moments  # the largest tensors
    for name, decoders in kinds.items():
        effect = spliced(layers, decoders, options.model, options.tokens, listener)
        solution = {"decoder": name, "alpha": decoders.alpha, "seconds": decoders.seconds}
        yield solution | on_held_out_rows(layers, decoders) | effect


def line(values: Sequence[Any]) -> str:
    words = ["" if value is None else value for value in values]
    words = [f"{word:.4g}" if isinstance(word, float) else word for word in words]
    return f"| {' | '.join(words)} |"


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """With the options that `cross_layer_descent.py` has too."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="names or patterns")
    parser.add_argument("--model", required=True)
    parser.add_argument("--growth", action="append", type=float, help="default: inf and 1")
    parser.add_argument("--alpha", type=float, help="default: by leave-one-out, for each solution")
    parser.add_argument("--tokens", type=int, default=4000, help="for KL and CE")
    parser.add_argument("--home", help="default: $SAE_HOME, else ./sae-data")
    return parser


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, help="write the last decoders here, for circuit-tracer")
    parser.add_argument("--json", type=Path, help="write all measures, by layer, into this file")
    options = parser.parse_args()
    options.growth = options.growth or GROWTHS
    documents = []
    try:
        for own in compare(options, Console()):
            if not documents:
                print(line(COLUMNS), line(["---"] * len(COLUMNS)), sep="\n")
            documents.append(own)
            fvu, own_fraction = (float(np.mean(own[name])) for name in ("fvu", "own_fraction"))
            gap = own["ce_spliced"] - own["ce_clean"]
            measures = fvu, own_fraction, own["kl"], gap, own["seconds"]
            print(line([own["decoder"], own["alpha"], *measures]), flush=True)
    except SaeError as error:
        sys.exit(str(error))
    if options.json:
        options.json.write_text(json.dumps(documents))


if __name__ == "__main__":
    main()
