#!/usr/bin/env bash
# Runs the tests, or with --lint ruff and mypy. Installs what is missing into .venv.
#
#     ./run_tests.sh                              every part: what a change has to pass
#     ./run_tests.sh recipe                       one part: recipe, planner or fleet
#     ./run_tests.sh tests/recipe/data -k stream  some tests; arguments are pytest's
#     ./run_tests.sh --quick                      two minutes: without the fleet, ranks, set-up and namespaces
#     ./run_tests.sh --all                        also what is too slow for every change; before a release
#     ./run_tests.sh --lint
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
needed=requirements-dev.txt
[[ ! -f titan_fleet/requirements-dev.txt ]] || needed=titan_fleet/requirements-dev.txt
py="$(scripts/setup_env.sh "$needed" --no-compile)" # Python compiles what the tests import

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
shared=(--numprocesses 2 --no-loadscope-reorder) # tests/conftest.py divides the tests
case "${1:-}" in
  "") set -- "${shared[@]}" ;;
  recipe) set -- tests/recipe tests/house "${shared[@]}" "${@:2}" ;;
  planner | fleet) set -- "tests/$1" "${shared[@]}" "${@:2}" ;;
  --quick) set -- "${shared[@]}" -m "not slow and not all" "${@:2}" ;;
  --all) set -- "${shared[@]}" -m "" "${@:2}" ;;
  -*) set -- "${shared[@]}" "$@" ;;
esac
exec "$py" -m pytest "$@"
