#!/usr/bin/env bash
# A transcoder and a crosscoder of tiny-gemma2, offline, in a minute or two on two cores: transcoders of an MLP with and
# without an affine skip, by both solvers, spliced in its place; and a crosscoder of two layers.
set -euo pipefail

out=${1:-results/targets}
mkdir -p "$out"
export SAE_HOME=$out/home

# Places of one command are row for row the same tokens.
sae extract --model tiny-gemma2 --layer 2 --site mlp_in --site mlp_out --rows 30000 --name mlp
sae extract --model tiny-gemma2 --layer 1 --layer 3 --rows 30000 --name layers

options="--data mlp-l2-mlp_in --target mlp-l2-mlp_out --act topk --k 16 --d-sae 512 --epochs 6"
for solver in sgd pam-sgd; do
    sae train $options --solver $solver --name transcoder-$solver
    sae train $options --solver $solver --skip --name skip-$solver
done
sae eval transcoder-sgd transcoder-pam-sgd skip-sgd skip-pam-sgd --model tiny-gemma2 --plot "$out/transcoders.png"
sae report skip-pam-sgd --model tiny-gemma2 --out "$out/pages"

sae train --data layers-l1-resid_post --data layers-l3-resid_post --act batchtopk --k 16 --d-sae 512 --epochs 6 \
    --name crosscoder
sae eval crosscoder
sae sparsity crosscoder --plot "$out/crosscoder.png"
