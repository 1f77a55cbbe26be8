#!/usr/bin/env bash
# Several processes on this machine, one run: each has its own workers, process 0 logs, all write checkpoints.
#   bash launch/local.sh [--processes=2] [--config=FILE[:key=value,...]] [--workdir=DIR] [--config.KEY=VALUE ...]
#
#   --platform=cpu     cpu, or gpu: one process for each GPU
#   --port=8476        of the coordinator, process 0
#   --elastic=false    true: when a process dies, go on from the last checkpoint without it and without its workers
#   --restarts=0       how often a run whose process died starts again; with --elastic at least one for each process
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

processes=$opt_processes restarts=$opt_restarts
if [ "$opt_elastic" = true ] && [ "$restarts" -lt $((processes - 1)) ]; then restarts=$((processes - 1)); fi

launch() {
  local i place
  pids=()
  for ((i = 0; i < processes; i++)); do
    if [ "$opt_platform" = cpu ]; then place=(JAX_PLATFORMS=cpu)
    else place=("CUDA_VISIBLE_DEVICES=$i"); fi
    start "$opt_workdir/logs/process-$i.log" env "FGD_COORDINATOR=localhost:$opt_port" "FGD_NUM_PROCESSES=$processes" \
      "FGD_PROCESS_ID=$i" "${place[@]}" "$python" -m fgd_jax.train "--config=$opt_config" "--workdir=$opt_workdir" \
      ${allow_cpu[@]+"${allow_cpu[@]}"} ${train_options[@]+"${train_options[@]}"} ${fewer[@]+"${fewer[@]}"}
  done
}

# The workers of the newest config in the run's folder, without the share of one process.
remaining_workers() {
  "$python" - "$opt_workdir/config.json" "$processes" <<'PYTHON'
import json, sys
workers, processes = json.load(open(sys.argv[1]))["workers"], int(sys.argv[2])
print(workers - workers // processes)
PYTHON
}

allow_cpu=() fewer=()
if [ "$opt_platform" = gpu ]; then allow_cpu=(--config.allow_cpu=false); fi
trap pass_on TERM INT
attempt=0
while true; do
  launch
  status=0
  wait_for_all || status=$?
  # 0: done. 2: cannot work. 143, 130: told to stop.
  if [ -n "$interrupted" ] || [ "$attempt" -ge "$restarts" ]; then exit "$status"; fi
  case "$status" in 0|2|130|143) exit "$status" ;; esac
  attempt=$((attempt + 1))
  if [ "$opt_elastic" = true ] && [ "$processes" -gt 1 ] && [ -f "$opt_workdir/config.json" ]; then
    workers=$(remaining_workers)
    processes=$((processes - 1))
    fewer=("--config.workers=$workers")
    echo "$script: process $failed died (status $status); going on from the last checkpoint with $processes processes and" \
      "$workers workers." >&2
  else
    echo "$script: process $failed died (status $status); starting again from the last checkpoint ($attempt of $restarts)." >&2
  fi
done
