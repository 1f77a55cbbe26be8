#!/usr/bin/env bash
# Several processes on this machine, one run: each has its own workers, process 0 logs, all write checkpoints.
#   bash launch/local.sh [--processes=2] [--config=FILE[:key=value,...]] [--workdir=DIR] [--config.KEY=VALUE ...]
#
#   --platform=cpu     cpu, or gpu: one process for each GPU
#   --port=8476        of the coordinator, process 0
#   --elastic=false    true: when a process dies, go on from the last checkpoint without it and without its workers
#   --restarts=0       how often a run whose process died starts again; with --elastic at least once for each but one
#   --dry-run          print the commands only
#
# Output goes to WORKDIR/logs/process-I.log, that of process 0 also to the terminal. SIGTERM or SIGINT: all save and end.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_options "processes=2 config=configs/quickstart.py workdir=runs/local platform=cpu port=8476 elastic=false restarts=0" "$@"
whole processes "$opt_processes"
whole port "$opt_port"
case "$opt_platform" in cpu|gpu) ;; *) fail "--platform=$opt_platform must be cpu or gpu." ;; esac
case "$opt_elastic" in true|false) ;; *) fail "--elastic=$opt_elastic must be true or false." ;; esac
case "$opt_restarts" in *[!0-9]*|'') fail "--restarts=$opt_restarts must be a whole number." ;; esac
find_python

for ((i = 0; i < opt_processes; i++)); do places+=("$opt_platform $i"); done
if [ "$opt_platform" = gpu ]; then train_options+=(--config.allow_cpu=false); fi

# The number of GPU i among those that CUDA_VISIBLE_DEVICES leaves.
visible() {
  local devices
  IFS=, read -r -a devices <<< "${CUDA_VISIBLE_DEVICES:-}"
  echo "${devices[$1]:-$1}"
}

launch() {
  local i place
  for i in "${!places[@]}"; do
    if [ "$opt_platform" = cpu ]; then place=JAX_PLATFORMS=cpu; else place=CUDA_VISIBLE_DEVICES=$(visible "${places[$i]#gpu }"); fi
    start "$opt_workdir/logs/process-$i.log" env "FGD_COORDINATOR=localhost:$opt_port" "FGD_NUM_PROCESSES=${#places[@]}" \
      "FGD_PROCESS_ID=$i" "$place" "$python" -m fgd_jax.train "--config=$opt_config" "--workdir=$opt_workdir" \
      ${train_options[@]+"${train_options[@]}"} ${fewer[@]+"${fewer[@]}"}
  done
}

supervise "$opt_restarts" "$opt_elastic" "$opt_workdir"
