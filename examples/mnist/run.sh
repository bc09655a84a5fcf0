#!/usr/bin/env bash
# The paper's experiments on MNIST: PAM-SGD and tied SGD, relu and TopK, on 1% to 100% of the rows, and ablations.
#
#     examples/mnist/run.sh --quick                                # scikit-learn's digits, offline
#     examples/mnist/run.sh --data train-images-idx3-ubyte.gz      # MNIST's own file
#     examples/mnist/run.sh                                        # MNIST from the Hugging Face hub
#
# Settings of the paper's code: d_sae 256, K = 15 largest in magnitude, relu without a penalty, Adam at 3e-3 on batches
# of 128, 50 epochs; pixels standardised by one mean and deviation; the decoder solved after
# each epoch with a ridge of 1e-6. Way `default`: the tool's defaults, with the same epochs.
section=mnist takes="images, in a file that sae import takes [MNIST from the hub; with --quick digits]"
# shellcheck source=examples/common.sh
source "$(dirname "$0")/../common.sh"

if $quick; then
    epochs=20 fractions="0.05 0.25" decays="0.0001 0.01" proximals="0.01 1" ablated="topk"
else
    epochs=50 fractions="0.01 0.05 0.1 0.25 0.5 1" decays="0.00001 0.0001 0.001 0.01"
    proximals="0.0001 0.001 0.01 0.1 1" ablated="topk relu"
fi
if [[ -z $data ]]; then
    if $quick; then data=digits; else data=hub; fi
fi
read -r rows d_in < <(python "$here/mnist/normalise.py" "$data" "$out/images.npy")
sae import "$out/images.npy" --name images > /dev/null

sgd="--data images --config mnist-sgd.toml" pam="--data images --config mnist-pam-sgd.toml"
all="--epochs $epochs"
topk="--act abs-topk --k 15" relu="--act relu --sparsity none"

for name in topk relu; do
    train base $name sgd 1 "${!name} $all $sgd"
    train base $name paper 1 "${!name} $all $pam"
    train base $name default 1 "${!name/abs-/} --data images --d-sae 256 $all"
    for fraction in $fractions; do  # of the epochs that the paper's code gives each
        some="--fraction $fraction --epochs $(awk "BEGIN { print $fraction < 1 ? 10 : 20 }")"
        train size $name sgd "$fraction" "${!name} $some $sgd"
        train size $name paper "$fraction" "${!name} $some $pam"
        train size $name default "$fraction" "${!name/abs-/} --data images --d-sae 256 $some"
    done
done
for name in $ablated; do
    for decay in $decays; do  # Adam's, which the paper's code uses, is half of this term's gradient
        weight=$(per 0.5 "$decay" "$d_in" "$rows")
        train decay $name sgd "$decay" "${!name} $all $sgd --weight-decay $weight"
        train decay $name paper "$decay" "${!name} $all $pam --weight-decay $weight"
    done
    for mu in $proximals; do
        weight=$(per "$mu" "$d_in" "$rows")
        train proximal $name sgd "$mu" "${!name} $all $sgd --mu-enc $weight --nu-enc $weight"
        train proximal $name paper "$mu" \
            "${!name} $all $pam --mu-enc $weight --nu-enc $weight"
    done
done
trained
python "$here/mnist/figures.py" "$out" --command "examples/mnist/run.sh$given"
