#!/usr/bin/env bash
# Runs the tests, or with --lint ruff and mypy. Installs what is missing into .venv.
#
#     ./run_tests.sh                       all tests
#     ./run_tests.sh tests/recipe/data -k stream  any arguments of pytest
#     ./run_tests.sh --quick               a few minutes: without tests/fleet/console, tests/recipe/distributed and tests/fleet/reach, ssh, the dry run,
#                                          the planner's long searches, the compiler, an installation, a conversion's memory
#     ./run_tests.sh --lint
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
py="$("$here/scripts/setup_env.sh" requirements-dev.txt --no-compile)" # Python compiles what the tests import
cd "$here"

if [[ "${1:-}" == --lint ]]; then
  failed=0
  "$py" -m ruff check . || failed=1
  "$py" -m ruff format --check . || failed=1
  "$py" -m mypy || failed=1
  exit "$failed"
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the tests start many small processes on few cores
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1  # a test that needs the network is a bug
unset TOKENIZERS_PARALLELISM
unset PYTHONDONTWRITEBYTECODE # else every process compiles what it imports
if [[ "${1:-}" == --quick ]]; then
  set -- -m "not slow" --numprocesses 2 --no-loadscope-reorder "${@:2}"
elif (($# == 0)); then
  set -- --numprocesses 2 --no-loadscope-reorder # tests/conftest.py divides the tests
fi
exec "$py" -m pytest "$@"
