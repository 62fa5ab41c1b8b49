"""A Postgres server of a test's own, at a socket in a folder of its own: nobody else reaches it."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DEBIAN = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True)  # it keeps the server off the PATH
PATH = os.pathsep.join([*DEBIAN, os.environ["PATH"]])
SERVER, INIT = (shutil.which(name, path=PATH) for name in ("postgres", "initdb"))


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """SQLAlchemy's URL of an empty database. The server refuses root, so `nobody` runs it then."""
    psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")
    if not SERVER or not INIT:
        pytest.skip("no Postgres server is installed")
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        how: dict[str, Any] = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        if os.getuid() == 0:
            other = pwd.getpwnam("nobody")
            os.chown(folder, other.pw_uid, other.pw_gid)
            how |= {"user": other.pw_uid, "group": other.pw_gid, "extra_groups": []}
        make = [INIT, "-D", "data", "-U", "console", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(make, check=True, **how)
        options = ["-D", "data", "-k", folder, "-c", "listen_addresses=", "-F"]
        server = subprocess.Popen([SERVER, *options], **how)
        try:
            end = time.monotonic() + 60
            while True:
                with contextlib.suppress(psycopg.OperationalError):
                    psycopg.connect(host=folder, user="console", dbname="postgres").close()
                    break
                assert server.poll() is None and time.monotonic() < end
                time.sleep(0.1)
            yield f"postgresql+psycopg://console@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGQUIT)
            server.wait(20)
