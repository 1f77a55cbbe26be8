#!/usr/bin/env bash
# Decoupled DiLoCo on a Ray cluster: asynchronous learners and a syncer as Ray actors.
#   bash launch/decoupled.sh [--config=FILE[:key=value,...]] [--workdir=DIR] [--config.KEY=VALUE ...]
#
#   --ray-address=     none: a Ray of its own on this machine; auto: the cluster that this machine is part of; or host:port
#   --submit=URL       hand it to a cluster's job server instead (http://HEAD:8265; needs ray[default] here); WORKDIR is then a
#                      path on the cluster, where the packages are installed
#   --dry-run          print the commands only
#
# A cluster: `ray start --head --port=6379` on one machine, `ray start --address=HEAD:6379` on the others, `ray stop` on all.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_options "config=configs/decoupled_quickstart.py workdir=runs/decoupled ray-address= submit=" "$@"
find_python
if [ -n "$opt_submit" ]; then
  if [ -n "$opt_ray_address" ]; then fail "--submit and --ray-address exclude each other; a submitted job uses its own cluster."; fi
  if [ -z "$dry_run" ] && ! command -v ray > /dev/null; then fail "ray was not found; pip install 'ray[default]'."; fi
  command=(ray job submit "--address=$opt_submit" --working-dir=. -- python)
  opt_ray_address=auto
else
  command=("$python")
fi
address=()
if [ -n "$opt_ray_address" ]; then address=("--ray-address=$opt_ray_address"); fi
run "${command[@]}" -m fgd_jax.decoupled "--config=$opt_config" "--workdir=$opt_workdir" ${address[@]+"${address[@]}"} \
  ${train_options[@]+"${train_options[@]}"}
