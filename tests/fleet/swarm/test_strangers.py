"""Connections without a certificate: as many as an attacker opens, the sites get through."""

import os
import resource
import subprocess
import sys
import time

import httpx
import pytest

from tests.fleet.swarm.served import keys, served
from tests.fleet.swarm.test_lying_site import HELLO, SECTION, SHARED, both, joined, link
from titan_fleet.swarm.syncer import door
from titan_fleet.swarm.syncer.server import Server
from torchtitan.refusal import Refusal

ATTACK = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (900, 900))
held = []
for _ in range(int(sys.argv[2])):
    each = socket.socket()
    each.bind((sys.argv[3], 0))
    each.connect(("127.0.0.1", int(sys.argv[1])))
    held.append(each)
print("all", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def few_descriptors():
    """A few hundred beside those that other tests hold in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(map(int, os.listdir("/dev/fd"))) + 350
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("address", ["127.0.0.2", "127.0.0.1"])
def test_sites_get_through_while_strangers_hold_connections(tmp_path, monkeypatch, caplog, few_descriptors, address):
    """From another address, and from their own; a handful of log lines tell of it."""
    monkeypatch.setattr(door, "HANDSHAKE_SECONDS", 2.0)
    keys(tmp_path, 3)
    with served(tmp_path, SECTION, SHARED) as (url, _):
        port, before = url.rpartition(":")[2], len(os.listdir("/dev/fd"))
        words = [sys.executable, "-S", "-c", ATTACK]
        strangers = [
            subprocess.Popen([*words, port, "300", address], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        try:
            assert [each.stdout.readline() for each in strangers] == [b"all\n"] * 2  # 600, of 400 descriptors
            (first, _), (second, _) = joined(tmp_path, url, 0), joined(tmp_path, url, 1)
            travels = both(first, second, (1.0, 1.0), 0, 10)
            assert [each.about["version"] for each in travels] == [1, 1]
            end = time.monotonic() + 60
            while len(os.listdir("/dev/fd")) >= before + 20:  # until the idle ones are closed
                assert time.monotonic() < end
                time.sleep(0.05)
            assert not first.is_away
        finally:
            for each in strangers:
                each.communicate(b"", timeout=20)
    said = [each.getMessage() for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    assert len(said) == 1 and f"of them from {address}: each further one closes an older one" in said[0]


def test_a_port_that_is_taken_is_refused_in_a_sentence(tmp_path):
    keys(tmp_path, 1)
    with served(tmp_path, SECTION, SHARED) as (url, syncer), pytest.raises(Refusal, match="give another --port"):
        Server(syncer, tmp_path / "keys/syncer").build("127.0.0.1", int(url.rpartition(":")[2]))


def test_a_site_holds_its_share_of_the_connections_and_the_others_theirs(tmp_path, few_descriptors, caplog):
    keys(tmp_path, 3)
    with served(tmp_path, SECTION, SHARED) as (url, _):
        held = []
        with pytest.raises(httpx.HTTPError):
            for _ in range(few_descriptors):
                held.append(link(tmp_path, url, 2))
                held[-1].client.get("/status")
        assert 20 < len(held) < few_descriptors / 3
        assert joined(tmp_path, url, 0)[0].client.get("/status").status_code == 200
        assert held[0].client.get("/status").status_code == 200
        assert held[0].ask("/hello", HELLO | {"site": "site-2"})["parts"] == 3
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(said) == 1 and "site site-2 has" in said[0] and "raise ulimit -n for the syncer" in said[0]
