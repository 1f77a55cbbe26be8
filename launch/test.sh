#!/usr/bin/env bash
# A virtual environment, the packages, linter, type checker and the whole test suite (needs no accelerator).
#   bash launch/test.sh [--gpu-aot] [pytest options, e.g. -k placement]
# --gpu-aot also compiles for GPUs: it installs the two CUDA plugin wheels (0.5 GB; no driver, no GPU is needed).
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
case "${1:-}" in -h|--help) sed -n '2,4s/^# \{0,1\}//p' launch/test.sh; exit 0 ;; esac
setup_venv "test,aot"
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
if [ "${1:-}" = "--gpu-aot" ]; then
  shift
  version=$(python -c 'import jaxlib; print(jaxlib.__version__)')
  python -m pip install --quiet --disable-pip-version-check --no-deps "jax-cuda12-plugin==$version" "jax-cuda12-pjrt==$version"
  export FGD_TEST_GPU_AOT=1
fi
ruff check .
mypy
python -m pytest -n "${FGD_TEST_PROCESSES:-2}" "$@"
