#!/usr/bin/env bash
# The paper's experiments on MNIST: PAM-SGD and tied SGD, relu and TopK, on 1% of the rows and more, and ablations.
#
#     examples/mnist/run.sh --quick                                # scikit-learn's digits, offline
#     examples/mnist/run.sh --seeds 3                              # 10,000 of MNIST's images, from the package registry
#     examples/mnist/run.sh --data train-images-idx3-ubyte.gz      # MNIST's own file
#     examples/mnist/run.sh --data hub                             # MNIST from the Hugging Face hub
#
# Settings of the paper's code: d_sae 256, K = 15 largest in magnitude, relu without a penalty, Adam at 3e-3 on batches
# of 128, 50 epochs; pixels standardised by one mean and deviation; the decoder solved after each epoch with a ridge of
# 1e-6. Ways `default` and `fair` are the tool's pam-sgd and sgd by default, with the same batches and epochs; `raw` is
# `default` on rows that are not centred, as the paper's are not; `ridge` is the paper's with a chosen ridge.
section=mnist takes="images, in a file that sae import takes, or hub [10,000 of MNIST; with --quick digits]"
# shellcheck source=examples/common.sh
source "$(dirname "$0")/../common.sh"

if $quick; then
    epochs=20 some_rows="81 404" decays="0.0001 0.01" proximals="0.01 1" penalties="0.3"
else
    epochs=50 some_rows="600 1500 3000 6000 15000 30000" # 1% to 50% of MNIST's
    decays="0.0001 0.001 0.01" proximals="0.0001 0.01 1" penalties="0.1 0.3 1"
fi
if [[ -z $data ]]; then
    if $quick; then
        data=digits
    else
        real mnist
        data=$real/mnist.npy
    fi
fi
read -r rows d_in < <(python "$here/mnist/normalise.py" "$data" "$out/images.npy")
sae import "$out/images.npy" --name images > /dev/null

sgd="--data images --config mnist-sgd.toml" pam="--data images --config mnist-pam-sgd.toml"
tool="--data images --d-sae 256 --batch-size 128"
all="--epochs $epochs"
topk="--act abs-topk --k 15" relu="--act relu --sparsity none"

# ways GROUP ACT VALUE OPTION...: train each way.
ways() {
    local options=${!2}
    train "$1" "$2" sgd "$3" "$options ${*:4} $sgd"
    train "$1" "$2" paper "$3" "$options ${*:4} $pam"
    train "$1" "$2" fair "$3" "${options/abs-/} ${*:4} $tool --solver sgd"
    train "$1" "$2" default "$3" "${options/abs-/} ${*:4} $tool"
}
for act in topk relu; do ways base $act 1 "$all"; done
train text topk sgd 1 "--act topk --k 15 $all $sgd"  # its text: the K largest, not in magnitude
train text topk paper 1 "--act topk --k 15 $all $pam"
for count in $some_rows $rows; do # with the epochs that the paper's code gives each
    ((count <= rows)) || continue
    few="--fraction $(share_of "$count" "$rows") --epochs $((count < 54000 ? 10 : 20))"
    for act in topk relu; do
        ways size $act "$count" "$few"
        train size $act ridge "$count" "${!act} $few $pam --alpha auto"
        train size $act raw "$count" "${!act/abs-/} $few $tool --normalize none"
    done
done
for penalty in $penalties; do # relu's error at equal L0
    train l1 relu fair "$penalty" "--act relu --sparsity-weight $penalty $all $tool --solver sgd"
    train l1 relu default "$penalty" "--act relu --sparsity-weight $penalty $all $tool"
done
decays "$topk $all $sgd" "$topk $all $pam"
for mu in $proximals; do
    weight=$(per "$mu" "$d_in" "$rows")
    train proximal topk sgd "$mu" "$topk $all $sgd --mu-enc $weight --nu-enc $weight"
    train proximal topk paper "$mu" "$topk $all $pam --mu-enc $weight --nu-enc $weight"
done
trained
geometry base-topk-default-1-0 15
if [[ -z $first ]]; then python "$here/mnist/updates.py" "$out" --seeds "$seeds"; fi
python "$here/mnist/figures.py" "$out" --command "examples/mnist/run.sh$given"
