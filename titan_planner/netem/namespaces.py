"""Network namespaces of this machine: words that give a program its own, and ways to enter them."""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator

from torchtitan.refusal import Refusal

_CLONE_NEWNET = 0x40000000


def unshared(*more: str) -> list[str]:
    """Words that start a command with a network and mounts of its own, which end with its last process."""
    needs_programs("unshare", "nsenter", "ip")
    as_user, error = ["--user", "--map-root-user"], ""
    for user in [[], as_user] if os.geteuid() == 0 else [as_user]:
        words = ["unshare", *user, "--mount", "--net", *more]
        tried = subprocess.run([*words, "true"], capture_output=True, text=True)
        if tried.returncode == 0:
            return words
        error = tried.stderr.strip()
    raise Refusal(
        f"this machine gives no network namespaces ({error}); be root, in a container one with CAP_SYS_ADMIN, or let "
        "users have them: sysctl -w user.max_user_namespaces=1000"
    )


def entered(process: int) -> list[str]:
    """Words that run a command in the namespaces of this process."""
    own, its = (os.stat(f"/proc/{pid}/ns/user").st_ino for pid in ("self", process))
    user = [] if own == its else ["--user", "--preserve-credentials"]
    return ["nsenter", f"--target={process}", *user, "--mount", "--net"]


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Sockets and devices that this thread makes here belong to the namespace that `ip netns` calls `name`."""
    libc = ctypes.CDLL(None, use_errno=True)
    own, there = os.open("/proc/thread-self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
        yield
    finally:
        libc.setns(own, _CLONE_NEWNET)
        os.close(own)
        os.close(there)


def needs_programs(*names: str) -> None:
    if missing := [name for name in names if not shutil.which(name)]:
        raise Refusal(f"{', '.join(missing)} is not on this machine; install iproute2 and util-linux")
