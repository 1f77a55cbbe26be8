#!/usr/bin/env bash
# One process on each of several hosts that ssh reaches, one run.
#   bash launch/ssh.sh --hosts=a,b[,...] [--config=FILE[:key=value,...]] [--workdir=DIR] [--config.KEY=VALUE ...]
#
#   --hosts=a,user@b   the first one is the coordinator: the others must reach its name (--coordinator=NAME where another
#                      one is right) on --port; process I runs on the I-th
#   --directory=DIR    of this repository on every host (default: as here)
#   --python=PYTHON    on every host (default .venv/bin/python, made by launch/setup_venv.sh)
#   --platform=auto    auto, cpu, gpu or tpu; all but cpu refuse to train on CPU
#   --port=8476        of the coordinator
#   --elastic=false    true: when a process or its host dies, go on from the last checkpoint without it and its workers
#   --restarts=0       how often a run whose process died starts again; with --elastic at least once for each host but one
#   --dry-run          print the commands only
#
# WORKDIR must be one folder that all hosts mount (relative to DIR). Output goes to WORKDIR/logs/process-I.log here, that of
# process 0 also to the terminal. SIGTERM or SIGINT: all save and end.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_options "hosts= config=configs/quickstart.py workdir=runs/ssh directory= python=.venv/bin/python platform=auto port=8476
               coordinator= elastic=false restarts=0" "$@"
if [ -z "$opt_hosts" ]; then
  if [ -z "$dry_run" ]; then fail "--hosts=a,b is needed: where the processes run."; fi
  opt_hosts="host-a,host-b"
fi
whole port "$opt_port"
case "$opt_platform" in auto|cpu|gpu|tpu) ;; *) fail "--platform=$opt_platform must be auto, cpu, gpu or tpu." ;; esac
case "$opt_restarts" in *[!0-9]*|'') fail "--restarts=$opt_restarts must be a whole number." ;; esac
IFS=, read -r -a places <<< "$opt_hosts"
for host in "${places[@]}"; do
  case "$host" in ''|-*|*[[:space:]]*) fail "--hosts=$opt_hosts has an entry that is no host; use --hosts=a,b." ;; esac
done
case "$opt_elastic" in true|false) ;; *) fail "--elastic=$opt_elastic must be true or false." ;; esac
place=()
if [ "$opt_platform" = cpu ]; then place=(JAX_PLATFORMS=cpu); else train_options+=(--config.allow_cpu=false); fi

launch() {
  local i command
  for i in "${!places[@]}"; do
    command="cd $(quoted "${opt_directory:-$root}") || exit 2; $(quoted env "FGD_COORDINATOR=$(coordinator):$opt_port" \
      "FGD_NUM_PROCESSES=${#places[@]}" "FGD_PROCESS_ID=$i" ${place[@]+"${place[@]}"} "$opt_python" -m fgd_jax.train \
      "--config=$opt_config" "--workdir=$opt_workdir" ${train_options[@]+"${train_options[@]}"} \
      ${fewer[@]+"${fewer[@]}"}) & pid=\$!"
    # A terminal (-tt) passes the end of ssh on, as SIGHUP to the shell there; the process then saves and ends.
    command+="; trap \"kill -TERM \$pid\" HUP TERM; wait \$pid; wait \$pid"
    start "$opt_workdir/logs/process-$i.log" ssh -tt -o BatchMode=yes -o ServerAliveInterval=15 "${places[$i]}" \
      "bash -c $(quoted "$command")"
  done
}

coordinator() { echo "${opt_coordinator:-${places[0]#*@}}"; }

supervise "$opt_restarts" "$opt_elastic" "$opt_workdir"
