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
      -h|--help) awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"; exit 0 ;;
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

# write FILE [MODE]: the file's text comes from standard input.
write() {
  if [ -n "$dry_run" ]; then
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
failed=""  # index of the process that ended first with an error

# start LOG COMMAND...: in the background; the first one is shown, all are kept in LOG.
start() {
  local log=$1 first=${#pids[@]}
  shift
  if [ -n "$dry_run" ]; then
    if [ "$first" = 0 ]; then echo "$(quoted "$@") > >(tee -a $(quoted "$log")) 2>&1 &"
    else echo "$(quoted "$@") >> $(quoted "$log") 2>&1 &"; fi
    pids+=(0)
    return
  fi
  mkdir -p "$(dirname "$log")"
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

# wait_for_all: 0 when all ended well; otherwise the status of the first that failed, after the others were stopped.
wait_for_all() {
  local i status=0 left=${#pids[@]} ended=() killer=""
  failed=""
  if [ -n "$dry_run" ]; then echo "wait"; return 0; fi
  while [ "$left" -gt 0 ]; do
    for i in "${!pids[@]}"; do
      if [ -n "${ended[$i]:-}" ] || kill -0 "${pids[$i]}" 2>/dev/null; then continue; fi
      ended[i]=1 left=$((left - 1))
      local one=0
      wait "${pids[$i]}" || one=$?
      if [ "$one" != 0 ] && [ -z "$failed" ]; then
        failed=$i status=$one
        # What is wrong for one is wrong for all (2), and a save before the end (143) takes a moment: they end by themselves.
        local grace=3
        if [ "$one" = 2 ] || [ "$one" = 143 ] || [ -n "$interrupted" ]; then grace=60; fi
        (sleep "$grace"; kill -KILL "${pids[@]}" 2>/dev/null) > /dev/null 2>&1 &
        killer=$!
      fi
    done
    sleep 0.2
  done
  if [ -n "$killer" ]; then kill "$killer" 2>/dev/null || true; fi
  pids=()
  return "$status"
}
