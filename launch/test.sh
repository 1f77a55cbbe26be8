#!/usr/bin/env bash
# A virtual environment, the packages, linter, type checker and the whole test suite (needs no accelerator).
#   bash launch/test.sh [pytest options, e.g. -k placement]
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
setup_venv "test"
ruff check .
mypy
JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} python -m pytest -n "${FGD_TEST_PROCESSES:-2}" "$@"
