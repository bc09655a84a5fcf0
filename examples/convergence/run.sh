#!/usr/bin/env bash
# The paper's convergence theory, watched on 100 of scikit-learn's digits: PAM with exact subproblems.
#
#     examples/convergence/run.sh --quick      # swish
#     examples/convergence/run.sh              # soft-topk as well, some minutes more
section=convergence
# shellcheck source=examples/common.sh
source "$(dirname "$0")/../common.sh"
if $quick; then acts="swish"; else acts="swish soft-topk"; fi
sae import digits > /dev/null
# shellcheck disable=SC2086
python "$here/convergence/descent.py" "$out" --acts $acts --command "examples/convergence/run.sh$given"
