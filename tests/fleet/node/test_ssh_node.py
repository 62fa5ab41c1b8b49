"""A container as a node: scripts/ssh_node.sh under a real sshd, and the templates of rented machines."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests import started
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts/ssh_node.sh"


@pytest.mark.skipif(not Path("/usr/sbin/sshd").exists() or not shutil.which("ssh-keygen"), reason="needs OpenSSH")
def test_a_container_lets_one_key_run_the_node_program_and_nothing_else(tmp_path: Path) -> None:
    for name in ("own", "strange"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    port = str(free_port())
    own = {"AUTHORIZED_KEY": (tmp_path / "own.pub").read_text().strip(), "NODE_HOME": str(tmp_path / "home")}
    environment = os.environ | own | {"PORT": port, "PYTHON": sys.executable}
    sshd = started.Popen([SCRIPT], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    options = ["-oStrictHostKeyChecking=no", "-oUserKnownHostsFile=/dev/null", "-oIdentitiesOnly=yes", "-p", port]

    def ask(key: str) -> "subprocess.CompletedProcess[str]":
        words = ["ssh", "-F", "/dev/null", "-i", tmp_path / key, *options, "127.0.0.1", "touch", tmp_path / "touched"]
        return subprocess.run(words, input='{"id":1,"do":"report"}\n', capture_output=True, text=True, timeout=60)

    try:
        end = time.monotonic() + 30
        while (answer := ask("own")).returncode == 255 and time.monotonic() < end:
            time.sleep(0.1)
        assert json.loads(answer.stdout)["kind"] == "report", answer.stderr
        assert "Permission denied" in ask("strange").stderr and not (tmp_path / "touched").exists()
    finally:
        sshd.terminate()
        sshd.wait(10)


def test_what_is_no_public_key_is_refused(tmp_path: Path) -> None:
    two = "ssh-ed25519 AAAA a\nssh-ed25519 AAAA b"
    for key in ("", "AAAA", two, 'command="sh" ssh-ed25519 AAAA'):
        done = subprocess.run([SCRIPT], env=os.environ | {"AUTHORIZED_KEY": key}, capture_output=True, text=True)
        assert done.returncode == 2 and "is no public key" in done.stderr


def test_the_templates_of_rented_machines_are_read() -> None:
    cloud, sky, akash = (
        yaml.safe_load((ROOT / f"examples/rented/{name}.yaml").read_text())
        for name in ("cloud-init", "skypilot", "akash")
    )
    assert not cloud["ssh_pwauth"] and cloud["users"][0]["ssh_authorized_keys"] and "CONSOLE_KEY" in sky["envs"]
    (script,) = akash["services"]["node"]["command"]
    assert (ROOT / script).is_file() and akash["services"]["node"]["expose"][0]["port"] == 2222
