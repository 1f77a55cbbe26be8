#!/usr/bin/env bash
# From nothing to a trained model: a virtual environment, the packages, a byte-level Llama trained with Factored Gossip
# DiLoCo on Python's own sources, a plot and a summary. Re-running it resumes, or says that the run is finished.
#   bash launch/quickstart.sh [--workdir=DIR] [--config.KEY=VALUE ...]
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
case "${1:-}" in -h|--help) sed -n '2,4s/^# \{0,1\}//p' launch/quickstart.sh; exit 0 ;; esac
setup_venv ""
# Without an accelerator's packages in the environment, CPU is what is asked for, whatever the machine has.
accelerated='import importlib.util as u, sys; sys.exit(not any(map(u.find_spec, ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin"))))'
if ! python -c "$accelerated"; then export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}; fi
workdir=runs/quickstart
options=()
for option in "$@"; do
  case "$option" in --workdir=*) workdir=${option#--workdir=} ;; *) options+=("$option") ;; esac
done
python -m fgd_jax.train --config=configs/quickstart.py --workdir="$workdir" ${options[@]+"${options[@]}"}
echo
cat "$workdir/summary.json"
echo
echo "Plot:    $workdir/curves.png"
echo "Metrics: $workdir/metrics.jsonl (TensorBoard events in $workdir/tensorboard)"
