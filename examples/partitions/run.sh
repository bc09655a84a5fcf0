#!/usr/bin/env bash
# The paper's geometry: SAEs between k-means and local PCA, and their cells as power diagrams.
#
#     examples/partitions/run.sh --quick      # digits, and the scripts of examples/geometry in short
#     examples/partitions/run.sh              # the same trained for longer
section=partitions
# shellcheck source=examples/common.sh
source "$(dirname "$0")/../common.sh"
if $quick; then epochs=100 steps=1500; else epochs=300 steps=5000; fi

sae import digits > /dev/null
for k in 1 3; do
    train top topk default $k "--data digits --act topk --k $k --d-sae 80 --epochs $epochs"
done
trained
for k in 1 3; do  # digits are few: measured on all of them
    geometry "top-topk-default-$k-0" "$k"
done
python "$here/geometry/bridge.py" --steps $steps --out "$out/bridge.png"
for name in voronoi_to_power orders lift kth_order_or_not; do
    python "$here/geometry/$name.py" --out "$out/$name.png"
done
python "$here/partitions/claims.py" "$out" --command "examples/partitions/run.sh$given"
