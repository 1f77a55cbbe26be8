# shellcheck shell=bash
# Sourced by the launchers: options of the form --name=value, dry runs, and processes that are watched together.
# A dry run prints the commands that a real run executes, quoted for a shell; both go through `run`, `start` and `write`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck disable=SC2034
root=$PWD
script=$(basename "$0")
dry_run=""
train_options=()

fail() { echo "$script: $*" >&2; exit 2; }

# parse_options "name=default ..." "$@": sets the variables opt_name; --config.KEY=VALUE goes to the training command.
parse_options() {
  local known=$1 word name value
  shift
  for word in $known; do
    name=${word%%=*}
    printf -v "opt_${name//-/_}" '%s' "${word#*=}"
  done
  for word in "$@"; do
    case "$word" in
      --dry-run) dry_run=1; continue ;;
      -h|--help) awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "launch/$script"; exit 0 ;;
      --config.*=*) train_options+=("$word"); continue ;;
      --*=*) ;;
      *) fail "$word is not an option of the form --name=value; --help lists them." ;;
    esac
    name=${word%%=*} value=${word#*=}
    name=${name#--}
    case " $known " in
      *" $name="*) printf -v "opt_${name//-/_}" '%s' "$value" ;;
      *) fail "--$name is unknown; --help lists the options." ;;
    esac
  done
}

# whole NAME VALUE: refuses what is not a whole number above 0.
whole() { case "$2" in ''|*[!0-9]*|0) fail "--$1=$2 must be a whole number above 0." ;; esac }

quoted() {
  local word out="" quote="'\\''"
  for word in "$@"; do
    case "$word" in
      ''|*[!A-Za-z0-9_@%+=:,./-]*) word="'${word//\'/$quote}'" ;;
    esac
    out+="$word "
  done
  printf '%s' "${out% }"
}

run() { if [ -n "$dry_run" ]; then quoted "$@"; echo; else "$@"; fi }

# write FILE: the file's text comes from standard input.
write() {
  if [ -n "$dry_run" ]; then
    run mkdir -p "$(dirname "$1")"
    echo "cat > $(quoted "$1") <<'END_OF_FILE'"
    cat
    echo "END_OF_FILE"
  else
    mkdir -p "$(dirname "$1")"
    cat > "$1"
  fi
}

# The interpreter: $PYTHON, that of the scripts' virtual environment, or the one on the path.
find_python() {
  python=${PYTHON:-}
  if [ -z "$python" ] && [ -x "${FGD_VENV:-.venv}/bin/python" ]; then python=${FGD_VENV:-.venv}/bin/python; fi
  if [ -z "$python" ]; then python=$(command -v python3 || echo python); fi
}

# --- processes that are watched together -----------------------------------------------------------------------------

pids=()
interrupted=""
failed=""  # index of the process that died

# start LOG COMMAND...: in the background; the first one is shown, all are kept in LOG.
start() {
  local log=$1 first=${#pids[@]}
  shift
  if [ "$first" = 0 ]; then run mkdir -p "$(dirname "$log")"; fi
  if [ -n "$dry_run" ]; then
    if [ "$first" = 0 ]; then echo "$(quoted "$@") > >(tee -a $(quoted "$log")) 2>&1 &"
    else echo "$(quoted "$@") >> $(quoted "$log") 2>&1 &"; fi
    pids+=(0)
    return
  fi
  if [ "$first" = 0 ]; then "$@" > >(tee -a "$log") 2>&1 &
  else "$@" >> "$log" 2>&1 & fi
  pids+=($!)
}

# Passes a signal on; the trainers then save and end. A second one ends them at once.
pass_on() {
  if [ -n "$interrupted" ]; then kill -KILL "${pids[@]}" 2>/dev/null || true; fi
  interrupted=1
  kill -TERM "${pids[@]}" 2>/dev/null || true
}

# wait_for_all: 0 when all ended well; otherwise a status, after all were stopped, and `failed` is the process that died: not
# one that ended since it had lost another (4, or 134 by jax), where there is another or one that hangs.
wait_for_all() {
  local i one status=0 left=${#pids[@]} ended=() killer="" hung=""
  failed=""
  if [ -n "$dry_run" ]; then echo "wait"; return 0; fi
  while [ "$left" -gt 0 ]; do
    for i in "${!pids[@]}"; do
      if [ -n "${ended[$i]:-}" ] || kill -0 "${pids[$i]}" 2>/dev/null; then continue; fi
      ended[i]=1 left=$((left - 1)) one=0
      wait "${pids[$i]}" || one=$?
      if [ "$one" = 0 ]; then continue; fi
      if [ -n "$killer" ] && ! kill -0 "$killer" 2>/dev/null; then hung=${hung:-$i}; fi
      if [ -z "$failed" ]; then
        failed=$i status=$one
        # What is wrong for one is wrong for all (2), and a save before the end (143) takes a moment: they end by themselves.
        local grace=3
        if [ "$one" = 2 ] || [ "$one" = 143 ] || [ -n "$interrupted" ]; then grace=60; fi
        (sleep "$grace"; kill -KILL "${pids[@]}" 2>/dev/null) > /dev/null 2>&1 &
        killer=$!
      elif lost_another "$status" && ! lost_another "$one" && [ -z "$hung" ]; then
        failed=$i status=$one
      fi
    done
    sleep 0.2
  done
  if lost_another "$status"; then failed=${hung:-$failed}; fi
  if [ -n "$killer" ]; then kill "$killer" 2>/dev/null || true; fi
  pids=()
  return "$status"
}

lost_another() { [ "$1" = 4 ] || [ "$1" = 134 ]; }

# supervise RESTARTS ELASTIC WORKDIR: runs `launch`, which starts a process for each entry of `places`, until the run is
# finished, cannot work (2) or was told to stop (143, 130), and again when a process died. Elastic: then without that place
# and its share of the workers, from the newest checkpoint; `fewer` holds the option for it. Ends the script.
places=()
fewer=()
supervise() {
  local restarts=$1 elastic=$2 workdir=$3 attempt=0 status workers known=""
  if [ "$elastic" = true ] && [ "$restarts" -lt $((${#places[@]} - 1)) ]; then restarts=$((${#places[@]} - 1)); fi
  trap pass_on TERM INT
  while true; do
    pids=() status=0
    launch
    wait_for_all || status=$?
    if [ -n "$interrupted" ] || [ "$attempt" -ge "$restarts" ]; then exit "$status"; fi
    case "$status" in 0|2|130|143) exit "$status" ;; esac
    attempt=$((attempt + 1))
    if [ "$elastic" = true ] && [ "${#places[@]}" -gt 1 ] && workers=${known:-$(workers_of "$workdir")} && [ -n "$workers" ]; then
      workers=$((workers - workers / ${#places[@]}))
      known=$workers  # the run may die again before its folder says so
      echo "$script: process $failed (${places[$failed]}) died with status $status; going on from the last checkpoint with" \
        "$((${#places[@]} - 1)) processes and $workers workers." >&2
      unset "places[$failed]"
      places=("${places[@]}")
      # shellcheck disable=SC2034
      fewer=("--config.workers=$workers")
    else
      echo "$script: process $failed (${places[$failed]}) died with status $status; starting again from the last checkpoint" \
        "($attempt of $restarts)." >&2
    fi
  done
}

# The number of workers in a run's folder; fails where that cannot be seen from here.
workers_of() {
  sed -n 's/^ *"workers": \([0-9]*\),\{0,1\}$/\1/p' "$1/config.json" 2>/dev/null | grep .
}
