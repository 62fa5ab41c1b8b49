"""Brings a bare host up: its shell unpacks an archive of the checkout and runs scripts/setup_env.sh there, or starts a
container of an image which has the packages.

This needs a key that may run commands; a key with a forced command has the node program already. Everything lies below
one folder of the host (default ~/.torchtitan-recipe), with one environment for all checkouts.
"""

import subprocess
import threading
from collections.abc import Callable, Sequence

from titan_fleet.ssh.client import ssh_command
from titan_fleet.ssh.pack import Packed
from torchtitan.foreign import printable
from torchtitan.refusal import Refusal

_UNPACK = """
set -eu
cd; mkdir -p "$1/code"; cd "$1"; home=$(pwd -P)
if [ -d "code/$2" ]; then echo "the checkout $2 is here already" >&2; cat >/dev/null; else
  echo "unpacking the checkout into $home/code/$2" >&2
  rm -rf "code/.$2"; mkdir "code/.$2"; tar -xzf - -C "code/.$2"; mv "code/.$2" "code/$2"
fi
cd "code/$2"
"""
_INSTALL = """
if [ ! -e .venv ] && [ -e "$home/venv" ]; then ln -sfn "$home/venv" .venv; fi
echo "scripts/setup_env.sh looks for the packages, and installs them into .venv if they are missing" >&2
python=$(bash scripts/setup_env.sh requirements.txt)
if [ ! -e "$home/venv" ] && [ -d .venv ]; then ln -sfn "code/$2/.venv" "$home/venv"; fi
case "$python" in /*) ;; *) python=$(command -v "$python") ;; esac
"""
# The container outlives connections, and so do its runs. Its Python is a script here, which works in the container.
_CONTAIN = r"""
engine=$(command -v docker || command -v podman) || { echo "neither docker nor podman is here" >&2; exit 1; }
case "$engine" in
  *docker) own="--user $(id -u):$(id -g)" gpus="--gpus all" ;;
  *) own="--userns keep-id" gpus="--device nvidia.com/gpu=all" ;;
esac
command -v nvidia-smi >/dev/null || gpus=
name=torchtitan-recipe-$(printf '%s %s' "$home" "$3" | cksum | cut -d' ' -f1)
"$engine" container inspect "$name" >/dev/null 2>&1 || "$engine" run --detach --init --name "$name" --network host \
  --ipc host $own $gpus --env "HOME=$home" --volume "$home:$home" "$3" sleep infinity >/dev/null
python="$home/code/$2.container"
printf '#!/bin/sh\n"%s" start %s >/dev/null && exec "%s" exec --interactive --workdir "$PWD" %s python3 "$@"\n' \
  "$engine" "$name" "$engine" "$name" >"$python"
chmod 755 "$python"
"""
_KEEP = """
echo "using $python" >&2
ln -sfn "$python" "$home/code/$2.python"
"""
# What a host that was brought up runs; 127 is a shell's own code for "not found".
_PROGRAM = """
cd; cd "$1" 2>/dev/null && home=$(pwd -P) && python=$(readlink "code/$2.python") && cd "code/$2" || exit 127
exec "$python" -m torchtitan node --home "$home"
"""
NOT_FOUND = 127


def program(home: str, code: str) -> list[str]:
    """The node program of a host that was brought up with this code."""
    return ["sh", "-c", _PROGRAM, "sh", home, code]


def bring_up(
    host: str, packed: Packed, home: str, ssh: Sequence[str], say: Callable[[str], None], image: str | None = None
) -> None:
    """Copy the checkout and make the environment; `say` gets each line that the host says meanwhile."""
    script = _UNPACK + (_CONTAIN if image else _INSTALL) + _KEEP
    command = ssh_command(host, ["sh", "-c", script, "sh", home, packed.code, image or ""], ssh)
    with packed.file.open("rb") as archive:
        process = subprocess.Popen(command, stdin=archive, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    said: list[str] = []

    def listen() -> None:
        assert process.stderr
        while line := process.stderr.readline(4096):
            said.append(printable(line.decode(errors="replace").rstrip()))
            say(said[-1])
            del said[:-5]

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        code = process.wait()
    except BaseException:
        process.kill()
        raise
    listener.join(5)
    if code:
        raise Refusal(
            f"{host} could not be set up ({'; '.join(said) or f'exit code {code}'}); mend that and start again"
        )
