#!/usr/bin/env bash
# Makes a container a node for `launch ssh` and the console: an sshd for one public key, which can run `torchtitan node`
# and nothing else. It needs no root.
#
#     docker run --gpus all --shm-size 8g -p 2222:2222 -e AUTHORIZED_KEY="ssh-ed25519 AAAA... console" torchtitan scripts/ssh_node.sh
#
# NODE_HOME (outputs/node) keeps runs, code and the host's key: on a volume, they outlive the container. PORT is 2222.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ! "${AUTHORIZED_KEY:-}" =~ ^(ssh|ecdsa|sk)-[^[:space:]]+\ [A-Za-z0-9+/=]+(\ [[:print:]]*)?$ ]]; then
  echo "AUTHORIZED_KEY = '${AUTHORIZED_KEY:-}' is no public key; set it to the one line of ~/.ssh/id_ed25519.pub" >&2
  exit 2
fi
home="$(realpath -m "${NODE_HOME:-outputs/node}")"
python="${PYTHON:-$PWD/.venv/bin/python}"
umask 077
mkdir -p "$home/ssh"
[[ -e "$home/ssh/host_key" ]] || ssh-keygen -q -t ed25519 -N '' -f "$home/ssh/host_key"
printf 'command="cd %q && exec %q -m torchtitan node --home %q",restrict %s\n' "$PWD" "$python" "$home" "$AUTHORIZED_KEY" \
  > "$home/ssh/authorized_keys"
[[ "$(id -u)" != 0 ]] || mkdir -p -m 755 /run/sshd
echo "node of user $(id -un) at port ${PORT:-2222}; its host key is $(ssh-keygen -lf "$home/ssh/host_key.pub")"
# StrictModes would refuse a home that the platform mounts for all users.
exec /usr/sbin/sshd -D -e -f /dev/null -o Port="${PORT:-2222}" -o HostKey="$home/ssh/host_key" \
  -o AuthorizedKeysFile="$home/ssh/authorized_keys" -o StrictModes=no -o PidFile=none -o UsePAM=no \
  -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no -o AllowAgentForwarding=no -o AllowTcpForwarding=no
