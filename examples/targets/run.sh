#!/usr/bin/env bash
# Transcoders of an MLP with and without an affine skip, by both solvers, spliced in its place; and a crosscoder of two
# layers.
#
#     examples/targets/run.sh --quick         # tiny-gemma2, offline, in two minutes on two cores
#     examples/targets/run.sh                 # Gemma-2-2B, layers 12, and 8 and 16
section=targets
# shellcheck source=examples/common.sh
source "$(dirname "$0")/../common.sh"
if $quick; then
    model=tiny-gemma2 layer=2 layers=(1 3) rows=30000
    set -- --k 16 --d-sae 512 --epochs 6
else
    model=google/gemma-2-2b layer=12 layers=(8 16) rows=1000000
    set -- --k 32 --d-sae 9216
fi

# Places of one command are row for row the same tokens.
sae extract --model $model --layer $layer --site mlp_in --site mlp_out --rows $rows --name mlp > /dev/null
sae extract --model $model --layer "${layers[0]}" --layer "${layers[1]}" --rows $rows --name layers > /dev/null

names=()
for skip in no with; do
    for solver in sgd pam-sgd; do
        names+=("transcoder-topk-$solver-$skip-skip-0")
        train transcoder topk $solver $skip-skip "--data mlp-l$layer-mlp_in --target mlp-l$layer-mlp_out --act topk \
            --solver $solver $([[ $skip == no ]] || echo --skip) $*"
    done
done
train crosscoder batchtopk default - "--data layers-l${layers[0]}-resid_post --data layers-l${layers[1]}-resid_post \
    --act batchtopk $*"
trained
sae eval "${names[@]}" --model $model | tee "$out/transcoders.txt"
sae report transcoder-topk-pam-sgd-with-skip-0 --model $model --out "$out/pages"
sae eval crosscoder-batchtopk-default---0
sae sparsity crosscoder-batchtopk-default---0 --plot "$out/crosscoder.png"
