#!/usr/bin/env bash
# Cloud TPU VMs: a slice, or several, as a queued resource; one process on every host, one run; restarted after preemption.
#   bash launch/tpu_vm.sh --bucket=BUCKET [--type=v5litepod-16] [--slices=1] [--config=FILE] [--workdir=NAME] [--action=all]
#
#   --name=fgd           of the queued resource; its nodes are NAME, or NAME-0, NAME-1, ... for several slices
#   --zone=us-west4-a    --project=  of gcloud's configuration where it is not given
#   --type=v5litepod-16  accelerator type of a slice      --version=v2-alpha-tpuv5-lite  runtime; both from Google's table
#   --slices=1           several slices talk over the data-centre network (multislice)
#   --spot=true          cheaper, may be preempted at any time
#   --bucket=BUCKET      Cloud Storage bucket, mounted on all hosts as ~/bucket; the run's folder is ~/bucket/WORKDIR
#   --workdir=runs/tpu   in the bucket (or an absolute path that all hosts mount otherwise, without --bucket)
#   --restarts=20        how often a preempted run is queued again and goes on from its last checkpoint
#   --action=all         create (wait for the machines), setup (copy and install), run, logs (fetch), delete; all: these five
#                        one after the other, again after every preemption
#   --dry-run            print the commands only
#
# The machines cost money from `create` to `delete`: an interrupted script leaves them; run --action=delete.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_options "name=fgd zone=us-west4-a project= type=v5litepod-16 version=v2-alpha-tpuv5-lite slices=1 spot=true bucket=
               workdir=runs/tpu config=configs/quickstart.py restarts=20 action=all" "$@"
whole slices "$opt_slices"
case "$opt_restarts" in *[!0-9]*|'') fail "--restarts=$opt_restarts must be a whole number." ;; esac
case "$opt_spot" in true|false) ;; *) fail "--spot=$opt_spot must be true or false." ;; esac
case "$opt_action" in all|create|setup|run|logs|delete) ;;
  *) fail "--action=$opt_action must be all, create, setup, run, logs or delete." ;; esac
if [ -z "$dry_run" ]; then
  if ! command -v gcloud > /dev/null; then fail "gcloud was not found; install the Google Cloud CLI and run gcloud init."; fi
  case "$opt_bucket$opt_workdir" in /*) ;; *)
    if [ -z "$opt_bucket" ]; then
      fail "--bucket=BUCKET is needed: checkpoints must outlive the machines (or --workdir=/an/absolute/shared/path)."
    fi ;;
  esac
elif [ -z "$opt_bucket" ]; then opt_bucket=BUCKET; fi

where=("--zone=$opt_zone")
if [ -n "$opt_project" ]; then where+=("--project=$opt_project"); fi
nodes=("$opt_name")
if [ "$opt_slices" != 1 ]; then
  nodes=()
  for ((i = 0; i < opt_slices; i++)); do nodes+=("$opt_name-$i"); done
fi
workdir=$opt_workdir
case "$workdir" in /*) ;; *) workdir="bucket/$workdir" ;; esac  # relative to the home folder, see `everywhere`

# everywhere NODE COMMAND: on all hosts of a slice, in the home folder.
everywhere() { run gcloud compute tpus tpu-vm ssh "$1" "${where[@]}" --worker=all "--command=$2"; }

create() {
  local request=(gcloud compute tpus queued-resources create "$opt_name" "${where[@]}" "--accelerator-type=$opt_type"
                 "--runtime-version=$opt_version")
  if [ "$opt_slices" = 1 ]; then request+=("--node-id=$opt_name")
  else request+=("--node-count=$opt_slices" "--node-prefix=$opt_name"); fi
  if [ "$opt_spot" = true ]; then request+=(--spot); fi
  run "${request[@]}"
  until active; do
    sleep 30 & wait $! || true
    if [ -n "$interrupted" ]; then exit 130; fi
  done
}

state() { run gcloud compute tpus queued-resources describe "$opt_name" "${where[@]}" "--format=value(state.state)"; }

# Whether the machines are there; ends the script where they will never be.
active() {
  local now
  now=$(state)
  if [ -n "$dry_run" ]; then echo "$now"; return 0; fi
  case "$now" in
    ACTIVE) return 0 ;;
    FAILED|SUSPENDED|SUSPENDING|DELETING) fail "The queued resource $opt_name is $now; see gcloud compute tpus" \
      "queued-resources describe $opt_name, then --action=delete." ;;
  esac
  echo "$script: $opt_name is ${now:-unknown}; waiting." >&2
  return 1
}

setup() {
  local node archive=/tmp/$opt_name-fgd_jax.tar.gz prepare missing
  run tar --exclude=./.git --exclude='./.venv*' --exclude=./runs -czf "$archive" . || return
  prepare="mkdir -p fgd_jax && tar -xzf $(quoted "$opt_name-fgd_jax.tar.gz") -C fgd_jax && cd fgd_jax && "
  prepare+="(python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || "
  prepare+="sudo apt-get install -y python3.11 python3.11-venv) && "
  prepare+="\$(command -v python3.11 || echo python3) -m venv .venv && .venv/bin/pip install --quiet '.[tpu]'"
  if [ -n "$opt_bucket" ]; then
    missing="echo 'gcsfuse is missing in this image; see launch/README.md' >&2; exit 1;"
    prepare+=" && { command -v gcsfuse > /dev/null || { $missing }; } && mkdir -p ~/bucket"
    prepare+=" && { mountpoint -q ~/bucket || gcsfuse --implicit-dirs --rename-dir-limit=200000 $(quoted "$opt_bucket") ~/bucket; }"
  fi
  for node in "${nodes[@]}"; do
    run gcloud compute tpus tpu-vm scp "$archive" "$node:" "${where[@]}" --worker=all || return
    everywhere "$node" "$prepare" || return
  done
}

# The same command on every host of every slice; the processes find each other through the TPU's metadata.
train() {
  local i command
  command="cd fgd_jax && mkdir -p ~/logs && ln -sfn ~/bucket bucket && set -o pipefail && "
  command+="$(quoted .venv/bin/python -m fgd_jax.train "--config=$opt_config" "--workdir=$workdir" \
    --config.allow_cpu=false ${train_options[@]+"${train_options[@]}"}) 2>&1 | tee -a ~/logs/\$(hostname).log"
  pids=()
  for ((i = 0; i < ${#nodes[@]}; i++)); do
    start "runs/$opt_name/logs/${nodes[$i]}.log" gcloud compute tpus tpu-vm ssh "${nodes[$i]}" "${where[@]}" --worker=all \
      "--command=bash -c $(quoted "$command")"
  done
  wait_for_all
}

logs() {
  local node
  for node in "${nodes[@]}"; do
    run mkdir -p "runs/$opt_name/logs/$node"
    run gcloud compute tpus tpu-vm ssh "$node" "${where[@]}" --worker=all "--output-directory=runs/$opt_name/logs/$node" \
      "--command=tail -n 10000 ~/logs/*.log" || echo "$script: no logs from $node; it may be gone." >&2
  done
}

delete() { run gcloud compute tpus queued-resources delete "$opt_name" "${where[@]}" --force --quiet; }

case "$opt_action" in
  create) create ;;
  setup) setup ;;
  run) trap pass_on TERM INT; train ;;
  logs) logs ;;
  delete) delete ;;
  all)
    trap pass_on TERM INT
    attempt=0
    while true; do
      status=0
      create
      setup || status=$?
      if [ "$status" = 0 ]; then train || status=$?; fi
      if [ -n "$interrupted" ]; then
        echo "$script: interrupted. The machines are still there and cost money: --action=run goes on, --action=delete ends it." >&2
        exit "$status"
      fi
      logs
      # ssh's status does not say why a run ended: only machines that are gone are worth another queue.
      lost=""
      if [ "$status" != 0 ] && [ "$(state)" != ACTIVE ]; then lost=1; fi
      delete
      if [ -z "$lost" ] || [ "$attempt" -ge "$opt_restarts" ]; then exit "$status"; fi
      attempt=$((attempt + 1))
      echo "$script: preempted; queued again ($attempt of $opt_restarts)." >&2
    done ;;
esac
