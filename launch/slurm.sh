#!/usr/bin/env bash
# A SLURM job: one process for each node, or for each GPU; it saves before its time is up and queues itself again.
#   bash launch/slurm.sh [--nodes=2] [--config=FILE[:key=value,...]] [--workdir=DIR] [--config.KEY=VALUE ...]
#
#   --tasks-per-node=1     processes of a node (with GPUs: 1, or as many as GPUs)
#   --gpus-per-node=0      0 trains on CPU
#   --cpus-per-task=       left to the partition where it is not given
#   --time=24:00:00        --partition=  --account=  --job-name=fgd
#   --grace=180            seconds before the end of its time at which the job is told to save
#   --requeue=true         go on in a new job after that, until the run is finished
#   --python=PYTHON        default: as on this machine (.venv/bin/python)
#   --dry-run              print the job's script and the command only
#
# The script is kept in WORKDIR/logs/job.sbatch, output in WORKDIR/logs/job-ID.log. WORKDIR must be on a shared file system.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_options "nodes=2 config=configs/quickstart.py workdir=runs/slurm tasks-per-node=1 gpus-per-node=0 cpus-per-task= time=24:00:00
               partition= account= job-name=fgd grace=180 requeue=true python=" "$@"
for name in nodes tasks-per-node grace; do variable=opt_${name//-/_}; whole "$name" "${!variable}"; done
case "$opt_gpus_per_node" in *[!0-9]*|'') fail "--gpus-per-node=$opt_gpus_per_node must be a whole number." ;; esac
case "$opt_requeue" in true|false) ;; *) fail "--requeue=$opt_requeue must be true or false." ;; esac
if [ "$opt_gpus_per_node" != 0 ] && [ "$opt_tasks_per_node" != 1 ] && [ "$opt_tasks_per_node" != "$opt_gpus_per_node" ]; then
  fail "--tasks-per-node=$opt_tasks_per_node must be 1 or --gpus-per-node=$opt_gpus_per_node."
fi
case "$opt_workdir$opt_job_name$opt_partition$opt_account$opt_time$opt_cpus_per_task" in
  *$'\n'*|*%*) fail "--workdir=$opt_workdir and the job's options must not hold % or line breaks." ;;
esac
find_python
python=${opt_python:-$python}
place=(env)
if [ "$opt_gpus_per_node" = 0 ]; then place+=(JAX_PLATFORMS=cpu); else train_options+=(--config.allow_cpu=false); fi
train=$(quoted srun --kill-on-bad-exit=1 "${place[@]}" "$python" -m fgd_jax.train "--config=$opt_config" \
  "--workdir=$opt_workdir" ${train_options[@]+"${train_options[@]}"})

job() {
  echo "#!/usr/bin/env bash"
  echo "#SBATCH --job-name=\"$opt_job_name\""
  echo "#SBATCH --nodes=$opt_nodes"
  echo "#SBATCH --ntasks-per-node=$opt_tasks_per_node"
  if [ "$opt_gpus_per_node" != 0 ]; then echo "#SBATCH --gpus-per-node=$opt_gpus_per_node"; fi
  if [ -n "$opt_cpus_per_task" ]; then echo "#SBATCH --cpus-per-task=$opt_cpus_per_task"; fi
  if [ -n "$opt_partition" ]; then echo "#SBATCH --partition=$opt_partition"; fi
  if [ -n "$opt_account" ]; then echo "#SBATCH --account=$opt_account"; fi
  echo "#SBATCH --time=$opt_time"
  echo "#SBATCH --signal=TERM@$opt_grace"  # to the processes: they save and end with 143
  echo "#SBATCH --output=\"$opt_workdir/logs/job-%j.log\""
  echo "#SBATCH --open-mode=append"
  if [ "$opt_requeue" = true ]; then echo "#SBATCH --requeue"; fi
  cat <<END
cd $(quoted "$root")
status=0
$train || status=\$?
END
  if [ "$opt_requeue" = true ]; then
    # shellcheck disable=SC2016
    echo 'if [ "$status" = 143 ]; then exec scontrol requeue "$SLURM_JOB_ID"; fi'
  fi
  # shellcheck disable=SC2016
  echo 'exit "$status"'
}

if [ -z "$dry_run" ] && ! command -v sbatch > /dev/null; then fail "sbatch was not found; run this on a SLURM login node."; fi
job | write "$opt_workdir/logs/job.sbatch"
run sbatch "$opt_workdir/logs/job.sbatch"
