"""A cross-layer transcoder from a set of transcoders: their encoders, and the decoder of all layers in closed form.

    sae extract --model MODEL --layer all --site mlp_in --site mlp_out --name m
    sae train --data 'm-l*-mlp_in' --target 'm-l*-mlp_out' --each --act batchtopk --k 16 --name t
    python examples/cross_layer.py 't-*' --model MODEL --growth 1 --growth 3

The output of each MLP is predicted from the codes of its own layer and of all before it (Ameisen et al., "Circuit
Tracing", 2025). The encoders, hence codes and L0, stay those of the runs; `cross_layer_decoder.py` solves for the
decoders. A table compares four kinds on held-out rows: the runs' own decoders, the same refitted layer by layer as `sae
refit` does, and across layers with each --growth of the ridge with distance. KL and CE are those of `sae eval
--together`: all layers are spliced in at once, with codes of that pass.

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

import torch
import yaml
from cross_layer_decoder import Decoders, Moments, collect, solve
from torch import Tensor

from saecli.base.console import Console, Listener
from saecli.base.devices import batches_on
from saecli.base.errors import ConfigError, FormatError, SaeError
from saecli.base.files import folder_appearing_whole, is_free
from saecli.base.home import Home
from saecli.extract.splice import hooked, spec_of
from saecli.measure.evaluate import check_model
from saecli.measure.measured import ChosenRows, Measured
from saecli.measure.refit import refit_decoder
from saecli.measure.together import together
from saecli.sae.activations import Relu
from saecli.sae.activations.base import Thresholded
from saecli.sae.codes import Codes
from saecli.sae.dictionary import SAE
from saecli.sae.formats import common
from saecli.sae.formats.circuit_tracer import CONFIG, Member, demand_set
from saecli.sae.metrics import Reconstruction
from saecli.store.opening import Joined
from saecli.store.reader import RowSource
from saecli.store.split import Which

BLOCK_ROWS = 2048


@dataclass(frozen=True)
class LayerSet:
    """Transcoders of several layers, in order, on one choice of held-out rows."""

    runs: list[Measured]
    stores: Joined  # inputs of all layers, then targets of all layers

    @classmethod
    def of(cls, home: Home, names: Sequence[str], listener: Listener) -> "LayerSet":
        chosen = ChosenRows(home, None, "test", "auto", listener)
        runs = [chosen.with_sae(name) for name in home.runs.matching(names)]
        runs.sort(key=_layer_of)
        _demand_one_per_layer(runs)
        targets = [run.stores.target for run in runs]
        stores = Joined((*(run.store for run in runs), *(own for own in targets if own)))
        stores.demand_alike()
        return cls(runs, stores)

    @property
    def saes(self) -> list[SAE]:
        return [run.sae for run in self.runs]

    def rows(self, which: Which) -> RowSource:
        return self.stores.split(which, seed=self.runs[0].subject.split_seed)

    def blocks(self, rows: RowSource) -> Iterator[tuple[list[Tensor], list[Codes], Tensor]]:
        """Rows in stored order: inputs, (B, D), and codes of each layer, and targets, (B, L, E)."""
        saes = self.saes
        widths = [sae.d_in for sae in saes] + [len(saes) * saes[0].d_out]
        for batch in batches_on(rows.sequential(BLOCK_ROWS), saes[0].W_enc.device):
            *inputs, y = batch.to(saes[0].W_enc.dtype).split(widths, 1)
            inputs = [x.contiguous() for x in inputs]
            codes = [sae.codes(x) for sae, x in zip(saes, inputs, strict=True)]
            yield inputs, codes, y.reshape(len(y), len(saes), -1)


def _layer_of(run: Measured) -> int:
    at = hooked((run.subject, run.saved), None, None)
    layers = {at.read.layer, at.written.layer}
    if not run.saved.is_transcoder or None in layers or len(layers) > 1:
        raise ConfigError(
            f"{run.subject.name} is no transcoder of one layer: expected runs of `sae train --each --target`, got one "
            f"from {at.read} to {at.written}; leave it out"
        )
    assert at.read.layer is not None
    return at.read.layer


def _demand_one_per_layer(runs: Sequence[Measured]) -> None:
    first, names = runs[0], {}
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
                f"{name} has a skip: expected transcoders without one, whose codes explain all; train without --skip"
            )
        for what, expected, got in (
            ("model", spec_of(first.saved.origin), spec_of(run.saved.origin)),
            ("width of the targets", first.sae.d_out, run.sae.d_out),
            ("split seed", first.subject.split_seed, run.subject.split_seed),
        ):
            if got != expected:
                raise ConfigError(
                    f"{first.subject.name} and {name} are not of one set: expected the same {what}, got {expected} "
                    f"and {got}; name runs of one `sae train --each`"
                )


def own_decoders(saes: Sequence[SAE]) -> Decoders:
    return Decoders(
        [{layer: sae.W_dec} for layer, sae in enumerate(saes)], [sae.b_dec for sae in saes]
    )


def refitted(layers: LayerSet, listener: Listener) -> Decoders:
    """Each layer's exact decoder alone, by `sae refit`."""
    seed = layers.runs[0].subject.split_seed
    saes = [
        refit_decoder(run.sae, run.stores.split("train", seed=seed), listener, own=True).sae
        for run in layers.runs
    ]
    return own_decoders(saes)


@torch.no_grad()
def moments_of(layers: LayerSet, rows: RowSource, listener: Listener) -> Moments:
    """The sums of one pass over rows."""
    saes, spread = layers.saes, rows.spread()
    inputs, shape = sum(sae.d_in for sae in saes), (len(saes), saes[0].d_out)
    mean, scatter = (
        torch.from_numpy(values[inputs:]).reshape(shape).to(saes[0].W_enc.device)
        for values in (spread.mean, spread.scatter)
    )
    moments = Moments([sae.d_sae for sae in saes], mean, scatter, rows.rows)
    with listener.progress("collecting sums over all layers", rows.rows, "rows") as show:

        def shown() -> Iterator[tuple[list[Codes], Tensor]]:
            done = 0
            for _, codes, y in layers.blocks(rows):
                yield codes, y
                done += len(y)
                show(done)

        return collect(moments, shown())


@torch.no_grad()
def held_out(layers: LayerSet, kinds: Sequence[Decoders]) -> list[dict[str, Any]]:
    """Of each kind of decoders, for each layer: FVU, L0, and the fraction of the explained variance that comes from the
    layer's own codes, `cov(z_l W[l->l], y_l) / cov(y_l_hat, y_l)`, summed over dimensions."""
    saes, device = layers.saes, layers.saes[0].W_enc.device
    count, width = len(saes), saes[0].d_out
    errors = [[Reconstruction(width, sae.d_sae, device=device) for sae in saes] for _ in kinds]
    mean = torch.from_numpy(layers.rows("test").spread().mean).to(device)[-count * width :]
    mean = mean.view(count, width)
    products = torch.zeros(len(kinds), count, 2, dtype=torch.float64, device=device)
    for _, codes, y in layers.blocks(layers.rows("test")):
        for kind, decoders in enumerate(kinds):
            for layer in range(count):
                y_hat = decoders.predict(layer, codes)
                errors[kind][layer].update(y[:, layer], y_hat, codes[layer])
                own = codes[layer].times(decoders.weights[layer][layer]).double()
                centred = y[:, layer].double() - mean[layer]
                products[kind, layer, 0] += (own * centred).sum()
                products[kind, layer, 1] += (y_hat.double() * centred).sum()
    measures = []
    for own_errors, own_products in zip(errors, products, strict=True):
        results = [error.result() for error in own_errors]
        measures.append(
            {
                "fvu": [result["fvu"] for result in results],
                "l0": [result["l0"] for result in results],
                "own_fraction": (own_products[:, 0] / own_products[:, 1]).tolist(),
            }
        )
    return measures


class Spliced(SAE):
    """One layer's transcoder whose prediction takes the codes of all layers before it, of the same forward pass."""

    def __init__(
        self, sae: SAE, layer: int, decoders: Decoders, codes_of_pass: dict[int, Codes]
    ) -> None:
        parameters, activation = sae.activation_parameters, sae.activation
        W_dec, b_dec = decoders.weights[layer][layer], decoders.biases[layer]
        super().__init__(sae.W_enc, sae.b_enc, W_dec, b_dec, activation, parameters)
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
    demand_set([Member.of(run.saved) for run in layers.runs])
    for run in layers.runs:
        if not isinstance(run.sae.activation, Relu | Thresholded):
            raise FormatError(
                f"circuit-tracer's cross-layer transcoders have relu or thresholds, {run.subject.name} has "
                f"{run.sae.activation.name}; train with --act batchtopk, jumprelu or relu"
            )
        if run.sae.d_in != run.sae.d_out:
            raise FormatError(
                f"circuit-tracer needs inputs and targets of one width, got {run.sae.d_in} and {run.sae.d_out} in "
                f"{run.subject.name}"
            )


def export(layers: LayerSet, decoders: Decoders, folder: Path) -> None:
    """Write circuit-tracer's folder of a cross-layer transcoder; see its `transcoder/cross_layer_transcoder.py`."""
    count = len(layers.runs)
    config = Member.of(layers.runs[0].saved).shared
    names = ("model_name", "feature_input_hook", "feature_output_hook")
    entries = {name: config[name] for name in names if name in config}
    with folder_appearing_whole(folder) as temporary:
        for source, sae in enumerate(layers.saes):
            tensors = {"W_enc": sae.W_enc.T, "b_enc": sae.b_enc, "b_dec": decoders.biases[source]}
            if isinstance(sae.activation, Thresholded):
                tensors["threshold"] = common.thresholds_of(sae)
            named = {f"{name}_{source}": tensor for name, tensor in tensors.items()}
            common.write_tensors(temporary / f"W_enc_{source}.safetensors", named)
            to_layers = [decoders.weights[target][source] for target in range(source, count)]
            W_dec = {f"W_dec_{source}": torch.stack(to_layers, 1)}
            common.write_tensors(temporary / f"W_dec_{source}.safetensors", W_dec)
        document = {"model_kind": "cross_layer_transcoder", **entries}
        (temporary / CONFIG).write_text(yaml.safe_dump(document, sort_keys=False))


def table(documents: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| decoder | alpha | FVU | own fraction | KL | CE - clean CE | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for own in documents:
        alpha = "" if own["alpha"] is None else f"{own['alpha']:.2g}"
        lines.append(
            f"| {own['decoder']} | {alpha} | {_mean(own['fvu']):.4f} | {_mean(own['own_fraction']):.3f} | "
            f"{own['kl']:.4f} | {own['ce_spliced'] - own['ce_clean']:.4f} | {own['seconds']:.1f} |"
        )
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def compare(options: argparse.Namespace, listener: Listener) -> list[dict[str, Any]]:
    if options.out and len(options.growth) != 1:
        raise ConfigError(
            f"--out takes one --growth, got {len(options.growth)}; name the one to write"
        )
    if options.out and not is_free(options.out):
        raise ConfigError(f"--out must be a new or empty folder, got {options.out}; give another")
    layers = LayerSet.of(Home.at(options.home), options.runs, listener)
    for run in layers.runs:
        check_model(run, options.model)
    if options.out:
        demand_exportable(layers)
    kinds = {"own": own_decoders(layers.saes), "refitted": refitted(layers, listener)}
    moments = moments_of(layers, layers.rows("train"), listener)
    for growth in options.growth:
        name = f"across, g = {growth:g}"
        kinds[name] = solve(moments, growth, options.alpha)
        listener.note(f"{name}: alpha {kinds[name].alpha:.3g}, {kinds[name].seconds:.1f} s")
    del moments
    documents = []
    for (name, decoders), measured in zip(
        kinds.items(), held_out(layers, [*kinds.values()]), strict=True
    ):
        effect = spliced(layers, decoders, options.model, options.tokens, listener)
        solution = {"alpha": decoders.alpha, "seconds": decoders.seconds}
        documents.append({"decoder": name, **solution, **measured, **effect})
    if options.out:
        export(layers, [*kinds.values()][-1], options.out)
    return documents


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="names or patterns of runs")
    parser.add_argument("--model", required=True)
    parser.add_argument("--growth", action="append", type=float, help="default: 1")
    parser.add_argument("--alpha", type=float, help="default: by leave-one-out")
    parser.add_argument("--tokens", type=int, default=4000, help="of KL and CE")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path, help="write all measures into this file")
    parser.add_argument("--home", help="default: $SAE_HOME, else ./sae-data")
    options = parser.parse_args()
    options.growth = options.growth or [1.0]
    try:
        documents = compare(options, Console())
    except SaeError as error:
        sys.exit(str(error))
    print(table(documents))
    if options.json:
        options.json.write_text(json.dumps(documents))


if __name__ == "__main__":
    main()
