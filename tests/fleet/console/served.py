"""A console in its own process over run folders that the recipe's writers made, and what a test asks of it."""

import contextlib
import datetime
import ipaddress
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from titan_fleet.console.database import open_database
from titan_fleet.console.door.people import People
from torchtitan.config.load import check_text, to_toml
from torchtitan.observe.metrics import JsonLines

ROOT = Path(__file__).parents[3]
HOSTILE = (
    b"<script>document.title='taken'</script> \x1b[31mred\x1b[0m \x1b]0;title\x07 \x08back \xe2\x80\xaebidi \xff\n"
)
TOML = (ROOT / "train_configs/debug_model.toml").read_text()


def write_run(folder: Path, steps: int = 30, lr: float = 3e-3, last_bytes: bytes = HOSTILE) -> Path:
    """A run that stopped: its configuration, records, a log, and a checkpoint's manifest."""
    (folder / "checkpoint/step-20").mkdir(parents=True)
    (folder / "checkpoint/step-20/manifest.json").write_text("{}")
    config = check_text(TOML.replace("lr = 3e-3", f"lr = {lr}"), "a test")
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    records, validations = JsonLines(folder / "metrics.jsonl", 0), JsonLines(folder / "validation.jsonl", 0)
    for step in range(1, steps + 1):
        record = {"loss": 8 - step / 10, "lr": lr, "tokens_seen": step * 100.0, "step_seconds": 0.5, "grad_norm": 1.0}
        records.write(step, record | {"tokens_per_second": 200.0, "memory_gib": float("nan")})
        if step % 10 == 0:
            validations.write(step, {"validation_loss": 8.5 - step / 10, "accuracy": step / 100})
    records.close(), validations.close()
    (folder / "train.log").write_bytes(b"".join(b"line %d\n" % i for i in range(20_000)) + last_bytes)
    return folder


class Served:
    """The console, and a client that calls it by its address."""

    def __init__(self, home: Path, runs: Path, *options: str, wait: bool = True) -> None:
        command = [sys.executable, "-m", "torchtitan", "console", "--no-browser", "--port", "0"]
        command += ["--home", str(home), "--runs", str(runs), *options]
        self.home, self.runs = home, runs
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line.startswith("console: http"), line + self.process.stdout.read()
        self.address = line.split()[1]
        self.port = int(self.address.rpartition(":")[2])
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.client = httpx.Client(base_url=self.address, verify=context, timeout=30)
        while wait:
            with contextlib.suppress(httpx.TransportError):
                self.client.get("/login")
                break
            time.sleep(0.05)

    def shake_hands(self, query: str = "", **headers: str) -> bytes:
        """The first line that a WebSocket's handshake gets, after these headers instead of a browser's."""
        host = f"127.0.0.1:{self.port}"
        own = {"Host": host, "Origin": self.address, "Upgrade": "websocket", "Connection": "Upgrade"}
        own |= {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version": "13"}
        lines = [f"{name}: {value}" for name, value in (own | headers).items() if value]
        path = f"/_nicegui_ws/socket.io/?EIO=4&transport=websocket{query}"
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as plain:
            plain.sendall("\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode())
            return plain.recv(4096).split(b"\r\n")[0]

    def stop(self) -> str:
        """What it printed."""
        self.client.close()
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.communicate(timeout=20)[0]
        finally:
            self.process.kill()


@contextlib.contextmanager
def served(home: Path, runs: Path, *options: str) -> Iterator[Served]:
    console = Served(home, runs, *options)
    try:
        yield console
    finally:
        console.stop()


def wait_for(look: Callable[[], object], seconds: float = 250) -> None:
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end
        time.sleep(0.3)


def token(home: Path, name: str, role: str) -> str:
    return People(open_database(home)).add_token(name, role)


def verb(*words: str) -> str:
    command = [sys.executable, "-m", "torchtitan", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that nobody else signed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).add_extension(names, False)
    made = made.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    files = folder / "tls.crt", folder / "tls.key"
    files[0].write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    os.chmod(files[1], 0o600)
    return files
