#!/usr/bin/env bash
# Prints the path of a Python that has the packages of a requirements file. If there is none, it creates .venv.
#
#     PY="$(scripts/setup_env.sh requirements.txt)"
#
# It uses $PYTHON if set, else the first that fits of .venv, python3 and a new .venv. It installs only into .venv.
# Further arguments are passed to `pip install`.
set -euo pipefail
case "${PYTHON:-}" in /*) ;; */*) PYTHON="$PWD/$PYTHON" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
requirements="${1:-requirements.txt}"
venv_python="$PWD/.venv/bin/python"
half_made=.venv/.half-made # exists until the last package of a new .venv is installed
read -r oldest too_new < <(sed -nE 's/^requires-python = ">=3\.([0-9]+),<3\.([0-9]+)"/\1 \2/p' pyproject.toml)

say() { echo "setup: $*" >&2; }
die() { say "$@"; exit 1; }

has_requirements() { "$1" scripts/check_requirements.py "$requirements" >/dev/null 2>&1; }
venv_is_ready() { [[ ! -e $half_made ]] && has_requirements "$venv_python"; }
lacks() { "$1" scripts/check_requirements.py "$requirements" --missing | paste -sd ';' - | sed 's/;/; /g'; }
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
fits() { [[ $1 == 3.* ]] && ((${1#3.} >= oldest && ${1#3.} < too_new)); }

find_python() { # python3 if its version fits, else the newest python3.N that does
  local name version first=""
  for name in python3 $(seq -f 'python3.%g' $((too_new - 1)) -1 "$oldest"); do
    version="$(version_of "$name")" || continue
    if fits "$version"; then command -v "$name"; return; fi
    first="${first:-$name is $version}"
  done
  die "${first:-there is no python3 on PATH}; Python >= 3.$oldest and < 3.$too_new is needed;" \
    "install one, put it on PATH as python3, and run this again"
}

make_venv() {
  local base output
  base="$(find_python)"
  say "creating .venv with $base ($(version_of "$base"))"
  rm -rf .venv && mkdir .venv && touch "$half_made"
  output="$("$base" -m venv .venv 2>&1)" && return
  echo "$output" >&2
  if [[ $output == *ensurepip* || $output == *"No module named venv"* ]]; then
    die "$base lacks the venv module, which creates .venv;" \
      "on Debian and Ubuntu: sudo apt install python$(version_of "$base")-venv; then run this again"
  fi
  die "$base could not create .venv; fix the error above and run this again"
}

install_requirements() {
  fits "$(version_of "$venv_python")" || die ".venv has Python $(version_of "$venv_python" || echo "that does not run");" \
    ">= 3.$oldest and < 3.$too_new is needed; delete .venv and run this again"
  "$venv_python" -m pip --version >/dev/null 2>&1 || die ".venv has no pip; install $requirements with the tool" \
    "that created .venv, or delete .venv and run this again"
  local lacking how_long="a minute"
  lacking="$(lacks "$venv_python" || true)"
  if [[ $lacking == *torch\ * ]]; then how_long="some minutes: torch and its GPU libraries take several GB"; fi
  say "installing $requirements into .venv, only this once; this takes $how_long"
  "$venv_python" -m pip install -qq --disable-pip-version-check "$@" -r "$requirements" >&2 ||
    die "pip could not install $requirements; fix the error above and run this again"
  rm -f "$half_made"
  venv_is_ready || die "pip installed $requirements, but .venv still lacks: $(lacks "$venv_python");" \
    "delete .venv and run this again"
}

if [[ -n "${PYTHON:-}" ]]; then
  version_of "$PYTHON" >/dev/null || die "PYTHON=$PYTHON does not run as a Python;" \
    "correct the path, or unset PYTHON to get a .venv"
  has_requirements "$PYTHON" || die "PYTHON=$PYTHON lacks: $(lacks "$PYTHON" || true)." \
    "Install them with \`$PYTHON -m pip install -r $requirements\`, or unset PYTHON to get a .venv"
  echo "$PYTHON"
elif venv_is_ready; then
  echo "$venv_python"
elif has_requirements python3; then
  command -v python3
else
  start=$SECONDS
  if command -v flock >/dev/null; then # a second shell waits, then finds .venv ready
    exec 9>.venv.lock
    flock -n 9 || { say "waiting for another shell, which is setting up .venv"; flock 9 || true; }
  fi
  if ! venv_is_ready; then
    if [[ ! -d .venv || -e $half_made ]]; then make_venv; fi
    install_requirements "${@:2}"
    say "ready after $((SECONDS - start)) s"
  fi
  echo "$venv_python"
fi
