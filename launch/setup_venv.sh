# Sourced by quickstart.sh and test.sh: finds Python >= 3.11, makes .venv beside pyproject.toml and installs the project with
# the extras in $1. Quick when nothing changed since the last time.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "Python >= 3.11 with venv was not found; install it (Debian: apt-get install python3-venv) or set PYTHON=/path/to/python." >&2
  exit 1
}

setup_venv() {
  local extras=$1 venv=${FGD_VENV:-.venv} stamp
  stamp=$(cat pyproject.toml launch/setup_venv.sh <(echo "$extras" "$root") | cksum)
  if ! "$venv/bin/python" -c '' 2>/dev/null; then
    local python
    python=$(find_python)
    echo "Making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
  fi
  if [ "$(cat "$venv/.installed-$extras" 2>/dev/null)" != "$stamp" ]; then
    echo "Installing fgd_jax with its packages (some minutes the first time)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".${extras:+[$extras]}"
    echo "$stamp" > "$venv/.installed-$extras"
  fi
  case "$venv" in /*) ;; *) venv=$root/$venv ;; esac
  export PATH="$venv/bin:$PATH"
}
