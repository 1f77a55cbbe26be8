#!/usr/bin/env bash
# TPU slices on GKE: one run as a JobSet, one pod on every host; the set starts again after a preemption and goes on.
#   bash launch/gke.sh --image=IMAGE --bucket=BUCKET [--config=FILE[:key=value,...]] [--workdir=NAME] [--config.KEY=VALUE ...]
#
#   --image=IMAGE        with this repository in its working directory and fgd-jax[tpu] (launch/README.md has a Dockerfile)
#   --accelerator=tpu-v5-lite-podslice  --topology=4x4  --chips-per-host=4   as the node pools have it
#   --slices=1           each in a node pool of its own (multislice)
#   --bucket=BUCKET      mounted at /runs by Cloud Storage FUSE, with --service-account=default; or
#   --claim=NAME         a PersistentVolumeClaim (ReadWriteMany) that is mounted there
#   --workdir=fgd        the run's folder, in the bucket
#   --spot=false         --restarts=20  --name=fgd  --namespace=default
#   --dry-run            print the manifest and the command only
#
# The cluster needs the JobSet controller. Logs: kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=NAME --prefix
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_options "name=fgd namespace=default image= accelerator=tpu-v5-lite-podslice topology=4x4 chips-per-host=4 slices=1 spot=false
               bucket= claim= service-account=default workdir=fgd config=configs/quickstart.py restarts=20" "$@"
for name in slices chips-per-host; do variable=opt_${name//-/_}; whole "$name" "${!variable}"; done
case "$opt_restarts" in *[!0-9]*|'') fail "--restarts=$opt_restarts must be a whole number." ;; esac
case "$opt_spot" in true|false) ;; *) fail "--spot=$opt_spot must be true or false." ;; esac
if [ -n "$dry_run" ]; then
  opt_image=${opt_image:-IMAGE}
  if [ -z "$opt_bucket$opt_claim" ]; then opt_bucket="bucket-name"; fi
fi
if [ -z "$opt_image" ]; then fail "--image=IMAGE is needed: a container image with fgd-jax[tpu] (launch/README.md)."; fi
if [ -z "$dry_run" ] && ! command -v kubectl > /dev/null; then
  fail "kubectl was not found; install it and get the cluster's credentials."
fi
find_python
case "$opt_workdir" in
  /runs/*) workdir=$opt_workdir ;;
  /*) fail "--workdir=$opt_workdir must be below /runs, where the bucket or claim is mounted, or a relative path there." ;;
  *) workdir=/runs/$opt_workdir ;;
esac
spot=()
if [ "$opt_spot" = true ]; then spot=(--spot); fi
manifest=$("$python" launch/jobset.py "--name=$opt_name" "--namespace=$opt_namespace" "--image=$opt_image" \
  "--accelerator=$opt_accelerator" "--topology=$opt_topology" "--chips-per-host=$opt_chips_per_host" "--slices=$opt_slices" \
  "--restarts=$opt_restarts" "--bucket=$opt_bucket" "--claim=$opt_claim" "--service-account=$opt_service_account" \
  ${spot[@]+"${spot[@]}"} -- python -m fgd_jax.train "--config=$opt_config" "--workdir=$workdir" --config.allow_cpu=false \
  ${train_options[@]+"${train_options[@]}"})
printf '%s\n' "$manifest" | write "runs/$opt_name/jobset.yaml"
run kubectl apply -f "runs/$opt_name/jobset.yaml"
