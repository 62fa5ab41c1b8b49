"""A syncer over real HTTPS: whom it lets in, what it refuses, what it merges, and what is left of it after a kill."""

import json
import socket
import ssl
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch

from benchmarks.fleet.swarm.line import Line
from tests.fleet.swarm.served import keys, served
from titan_fleet.section import Swarm
from titan_fleet.swarm import certificates, codec
from titan_fleet.swarm.fragments import Box
from titan_fleet.swarm.link import Link, Links, Travel
from titan_fleet.swarm.outer import Outer
from titan_fleet.swarm.syncer import export
from titan_fleet.swarm.syncer.state import FragmentState, Meeting
from torchtitan.refusal import Refusal
from torchtitan.tools import verbs

SHARED = {"protocol": 1, "model.name": "llama3"}
ALONE = {"place": [0, 1], "swarm": ""}  # among the swarm's syncers
TABLE = [["a", [8, 300]], ["b", [64]]]
WHOLE = [Box(0, 0, 8, 0, 300), Box(1, 0, 1, 0, 64)]


def section(**more):
    return Swarm(**({"fragments": 1, "codec": "float32", "quorum": 2, "sites": 3, "grace_seconds": 0.3} | more))


def numbers(value):
    return b"".join(codec.pack(torch.full(box.shape, float(value)), torch.empty(0), "float32") for box in WHOLE)


def link(folder, url, number=0):
    return Link(url, folder / f"keys/site-{number}", 0)


def joined(folder, url, number=0, is_new=True, step=0):
    own = link(folder, url, number)
    own.run = own.ask("/hello", {"site": f"site-{number}", "shared": SHARED, "streams": 8} | ALONE)["run"]
    told = own.ask("/join", {"run": own.run, "weights": TABLE, "step": step, "is_new": is_new})
    own.session = told["session"]
    if told["versions"] == [-1]:
        own.found(0, WHOLE, numbers(1))
    return own


def carried(own, value, base=0, step=10, tokens=100):
    """A difference of this value everywhere, on its way in a thread."""
    body = b"".join(codec.pack(*codec.encode(torch.full(b.shape, float(value)), "float32"), "float32") for b in WHOLE)
    travel = Travel(0, base, step, tokens, WHOLE, WHOLE, body)
    thread = threading.Thread(target=own.carry, args=(travel,), daemon=True)
    thread.start()
    return travel, thread


def met(*carrying):
    for travel, thread in carrying:
        thread.join(20)
        assert travel.failed is None and travel.about is not None
    return [travel for travel, _ in carrying]


@pytest.fixture
def folder(tmp_path):
    keys(tmp_path, 3)
    return tmp_path


def test_a_meeting_weighs_by_tokens_and_everyone_gets_the_same(folder):
    with served(folder, section(), SHARED) as (url, syncer):
        first, second = joined(folder, url, 0), joined(folder, url, 1)
        travels = met(carried(first, 1.0, tokens=300), carried(second, -1.0, tokens=100))
        assert {tuple(t.about["counted"].items()) for t in travels} == {(("site-0", 10), ("site-1", 10))}
        assert travels[0].payload == travels[1].payload
        assert syncer.fragments[0].anchor[0][0, 0].item() == pytest.approx(1 - 0.7 * 1.6 * 0.5)
        assert syncer.status()["sites"]["site-0"]["tokens"] == 300


def test_a_slow_site_holds_the_others_no_longer_than_the_grace_and_counts_at_the_next_meeting(folder):
    with served(folder, section(), SHARED) as (url, _):
        sites = [joined(folder, url, n) for n in range(3)]
        begun = time.monotonic()
        travels = met(carried(sites[0], 1.0), carried(sites[1], 1.0))
        assert 0.3 <= time.monotonic() - begun < 20 and set(travels[0].about["counted"]) == {"site-0", "site-1"}
        late = carried(sites[2], 4.0, base=0, step=10)
        (third, *_) = met(late, carried(sites[0], 1.0, base=1, step=20))
        assert third.about["version"] == 2 and third.about["updates"] == 2 and "site-2" in third.about["counted"]


def test_what_is_not_finite_is_left_out_by_name(folder):
    with served(folder, section(), SHARED) as (url, _):
        first, second = joined(folder, url, 0), joined(folder, url, 1)
        travels = met(carried(first, float("nan")), carried(second, 1.0))
        assert travels[0].about["rejected"] == {"site-0": [10, "its difference is not finite"]}
        assert list(travels[1].about["counted"]) == ["site-1"]


def test_a_killed_syncer_goes_on_from_its_last_merge_and_makes_a_lost_anchor_from_its_updates(folder):
    with served(folder, section(), SHARED) as (url, syncer):
        first, second = joined(folder, url, 0), joined(folder, url, 1)
        met(carried(first, 1.0), carried(second, 1.0))
        anchor, velocity, run = syncer.fragments[0].anchor, syncer.fragments[0].velocity, syncer.run
    files = Path(folder / "syncer/fragment-0")
    (files / "version-9.safetensors.part").write_bytes(b"half")
    with served(folder, section(), SHARED) as (url, syncer):
        again = syncer.fragments[0]
        assert syncer.run == run and again.version == 1 and all(map(torch.equal, anchor, again.anchor))
        assert all(map(torch.equal, velocity, again.velocity)) and again.meeting_of("site-0", 10, 0).version == 1
        replayed = joined(folder, url, 0, is_new=False)  # a site that went back to before the meeting lives through it
        assert met(carried(replayed, 1.0, base=0, step=10))[0].about["version"] == 1
    (files / "version-1.safetensors").unlink()  # a disk that lost the last merge
    with served(folder, section(), SHARED) as (url, syncer):
        first, second = joined(folder, url, 0, False), joined(folder, url, 1, False)
        assert syncer.fragments[0].version == 1 and all(map(torch.equal, anchor, syncer.fragments[0].anchor))
        travels = met(carried(first, 1.0, base=1, step=20), carried(second, 1.0, base=1, step=20))
        assert travels[0].about["version"] == 2
    for name in ("version-2", "update-1"):  # an older copy of the folder
        (files / f"{name}.safetensors").unlink()
    with served(folder, section(), SHARED) as (url, syncer):
        (travel, thread) = carried(joined(folder, url, 0, False), 1.0, base=2, step=30)
        thread.join(20)
        assert "this site has anchor 2 of fragment 0, and this syncer's newest is 1" in str(travel.failed)
    (files / "version-1.safetensors").unlink()
    with pytest.raises(Refusal, match="sites have anchor 1, and no file of an anchor is left here"):
        with served(folder, section(), SHARED):
            pass


def test_a_site_that_starts_again_does_not_replace_the_run(folder):
    with served(folder, section(), SHARED) as (url, syncer):
        before, again = joined(folder, url, 0), joined(folder, url, 0)
        again.found(0, WHOLE, numbers(5))
        assert syncer.fragments[0].anchor[0][0, 0].item() == 1
        with pytest.raises(Refusal, match=r"has joined again since \(session 2, this message is of 1\)"):
            before.found(0, WHOLE, numbers(5))


def test_what_is_stale_foreign_or_of_another_model_is_refused_with_the_difference(folder):
    with served(folder, section(sites=2), SHARED) as (url, _):
        own = joined(folder, url, 0)
        with pytest.raises(Refusal, match="model.name is 'qwen3' at this site and 'llama3' in the run"):
            own.ask(
                "/hello",
                {
                    "site": "site-0",
                    "shared": SHARED | {"model.name": "qwen3"},
                    "streams": 8,
                    "place": [0, 1],
                    "swarm": "",
                },
            )
        with pytest.raises(Refusal, match="swarm.site = 'site-1', but the certificate is that of site-0"):
            own.ask("/hello", {"site": "site-1", "shared": SHARED, "streams": 8} | ALONE)
        with pytest.raises(Refusal, match="16 streams of data, and the run 8; set training.num_streams = 8"):
            own.ask("/hello", {"site": "site-0", "shared": SHARED, "streams": 16} | ALONE)
        with pytest.raises(Refusal, match=r"another model than the run: \['a', \[9, 300\]\] and \['a', \[8, 300\]\]"):
            own.ask("/join", {"run": own.run, "weights": [["a", [9, 300]]], "step": 0, "is_new": True})
        own.run = "another"
        with pytest.raises(Refusal, match="and the message is for another"):
            own.found(0, WHOLE, numbers(1))
        joined(folder, url, 1)
        with pytest.raises(Refusal, match="all 2 parts of the data have their site .site-0, site-1"):
            link(folder, url, 2).ask("/hello", {"site": "site-2", "shared": SHARED, "streams": 8} | ALONE)
    with pytest.raises(Refusal, match="holds another swarm's run: model.name is 'qwen3' in this file"):
        with served(folder, section(sites=2), SHARED | {"model.name": "qwen3"}):
            pass


def test_strangers_revoked_sites_and_broken_bodies_get_nothing_and_stop_nobody(folder, tmp_path_factory):
    stranger = tmp_path_factory.mktemp("stranger")
    keys(stranger, 1)
    with served(folder, section(), SHARED) as (url, syncer):
        own, host = joined(folder, url, 0), ("127.0.0.1", int(url.rpartition(":")[2]))
        slow = socket.create_connection(host)  # says nothing, and hangs up at the end
        with pytest.raises(httpx.HTTPError):  # no certificate
            httpx.get(f"{url}/status", verify=False)
        with pytest.raises(httpx.HTTPError):  # of another authority
            made = ssl.create_default_context(cafile=folder / "keys/site-0/authority.pem")
            made.load_cert_chain(stranger / "keys/site-0/own.pem", stranger / "keys/site-0/own.key")
            httpx.get(f"{url}/status", verify=made)
        with pytest.raises(httpx.HTTPError):  # a site that believes another authority
            httpx.get(f"{url}/status", verify=certificates.context(stranger / "keys/site-0", is_server=False))
        with pytest.raises(httpx.HTTPError):  # a site's certificate is none of a syncer
            made = certificates.context(folder / "keys/site-0", is_server=False)
            made.maximum_version = made.minimum_version = ssl.TLSVersion.TLSv1_2
            httpx.get(f"{url}/status", verify=made)
        path = f"{url}/{own.run}/{own.session}/0/difference"
        for body in (b"", b"\0" * 100, b"\xff" * 100):
            assert own.client.post(path, content=body).status_code == 409
        for body in (bytes((1 << 24) + 1), iter([b"of no stated size"])):
            try:
                assert "are the most" in own.client.post(f"{url}/hello", content=body).json()["refusal"]
            except httpx.WriteError:  # the syncer hung up while this was being sent
                pass
        certificates.revoke(folder / "keys", "site-0")
        assert "certificate of site-0 is revoked" in own.client.get(f"{url}/status").json()["refusal"]
        assert joined(folder, url, 1).client.get(f"{url}/status").json()["run"] == syncer.run
        slow.close()


def test_a_sender_that_stands_still_is_given_up_and_a_slow_one_counts_as_there(folder, monkeypatch):
    monkeypatch.setattr("titan_fleet.swarm.syncer.server.SILENT_SECONDS", 1.0)
    monkeypatch.setattr("titan_fleet.swarm.syncer.syncer.ABSENT_SECONDS", 1.5)
    with served(folder, section(), SHARED) as (url, syncer):
        own = joined(folder, url, 0)
        raw = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        with certificates.context(folder / "keys/site-0", False).wrap_socket(
            raw, server_hostname="127.0.0.1"
        ) as sending:
            head = f"POST /{own.run}/{own.session}/0/difference HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
            sending.sendall(head.encode())
            for _ in range(10):  # longer than either time
                time.sleep(0.2)
                sending.sendall(b"x")
                assert syncer.present() == ["site-0"]
            sending.settimeout(10)
            assert b"408" in sending.recv(1000)
        assert joined(folder, url, 1).client.get(f"{url}/status").status_code == 200


def test_two_syncers_share_the_fragments_and_refuse_a_site_that_lists_them_otherwise(folder):
    both = section(fragments=2, quorum=1)
    with served(folder, both, SHARED, out="one") as (one, _), served(folder, both, SHARED, out="two") as (two, behind):
        said = {"site": "site-0", "shared": SHARED, "streams": 8}
        links = Links([one, two], folder / "keys/site-0", 0)
        told = links.hello(said)
        links.take_runs(told["runs"])
        links.take_sessions(links.join({"weights": TABLE, "step": 0, "is_new": True})["sessions"])
        for number, boxes in enumerate(behind.fragments[n].boxes for n in range(2)):
            links.of(number).found(number, boxes, bytes(4 * behind.fragments[number].size))
        assert links.join({"weights": TABLE, "step": 0, "is_new": False})["versions"] == [0, 0]
        assert behind.status()["versions"] == {1: 0} and behind.status()["run"] == links.run == told["runs"][0]
        with pytest.raises(Refusal, match="as number 1 of 2 of swarm .* it is number 2 of 2 of swarm .* same order"):
            Links([two, one], folder / "keys/site-0", 0).hello(said)
        with pytest.raises(Refusal, match="as number 1 of 1 of swarm .* it is number 2 of 2"):
            Links([two], folder / "keys/site-0", 0).hello(said)
    assert export.in_order([folder / "two", folder / "one"])[0] == [folder / "one", folder / "two"]
    with pytest.raises(Refusal, match="these are not the folders of all 2 syncers"):
        export.in_order([folder / "two"])


def test_keys_are_made_once_and_private(tmp_path, capsys):
    module, parser = verbs.load("swarm keys")
    module.run(
        parser.parse_args(["--syncer", "meet.example.org,10.0.0.1", "--sites", "zurich,lima", "--out", str(tmp_path)]),
        [],
    )
    assert "for the site lima, valid for 365 days" in capsys.readouterr().out
    assert certificates.sites_of(tmp_path / "syncer") == ["zurich", "lima"]
    assert (tmp_path / "lima/own.key").stat().st_mode & 0o77 == 0
    for words, says in (
        (["--sites", "lima"], "lima exists; remove it"),
        (["--sites", "Lima"], "use small letters"),
        ([], "makes nothing yet"),
        (["--revoke", "oslo"], "nothing to revoke"),
    ):
        with pytest.raises(Refusal, match=says):
            module.run(parser.parse_args([*words, "--out", str(tmp_path)]), [])
    with pytest.raises(Refusal, match="lacks authority.pem, own.pem, own.key; make it with"):
        certificates.context(tmp_path, is_server=False)


def test_a_full_disk_leaves_a_merge_as_if_it_had_not_begun(tmp_path, monkeypatch):
    state = FragmentState(tmp_path, WHOLE, "float32", Outer(0.7, 0.9))
    state.found("x", 0, WHOLE, memoryview(numbers(1)))
    for site in ("x", "y"):
        state.add(site, 0, 0, 10, 100, WHOLE, memoryview(numbers(2)))
    for failing in (1, 2):  # while the update is written, and while the anchor is
        calls = []

        def full(descriptor, calls=calls, failing=failing):
            calls.append(descriptor)
            if len(calls) == 2 * failing - 1:
                raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
            patched.setattr("os.fsync", full)
            state.merge("a test")
        assert state.version == 0 and state.anchor[0][0, 0] == 1 and not state.velocity[0].any()
        assert set(state.arrived()) == {"x", "y"} and not state.meetings
    assert state.merge("a test").version == 1 and state.anchor[0][0, 0].item() == pytest.approx(1 - 0.7 * 1.9 * 2)


def test_a_site_that_makes_more_steps_than_the_others_counts_and_is_judged_by_its_own_differences(tmp_path):
    state, about = FragmentState(tmp_path, WHOLE, "float32", Outer(0.7, 0.0)), []
    state.found("x", 0, WHOLE, memoryview(numbers(1)))
    values = [{"fast": 30, "x": 1, "y": 1}] * 5 + [{"fast": 400, "x": 1, "y": 1}, {"fast": 30, "x": 11, "y": 1}]
    for step, meeting in enumerate(values):
        for site, value in meeting.items():
            state.add(site, 0, state.version, step, 10, WHOLE, memoryview(numbers(value)))
        about.append(list(state.merge("a test").rejected))
        state = FragmentState(tmp_path, WHOLE, "float32", Outer(0.7, 0.0))  # the norms are on the disk, too
    assert about == [[], [], [], [], [], ["fast"], []]


def test_a_file_with_the_norms_of_all_sites_in_one_list_is_read(tmp_path):
    state = FragmentState(tmp_path, WHOLE, "float32", Outer(0.7, 0.0))
    state.norms = [1.0, 1.0, 1.0, 1.0]
    state.found("x", 0, WHOLE, memoryview(numbers(1)))
    again = FragmentState(tmp_path, WHOLE, "float32", Outer(0.7, 0.0))
    again.add("x", 0, 0, 1, 10, WHOLE, memoryview(numbers(30)))
    assert again.merge("a test").counted == {"x": 1}


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_updates_lead_from_one_anchor_to_the_next_for_any_part_of_it(tmp_path, kind):
    state = FragmentState(tmp_path, WHOLE, kind, Outer(0.7, 0.9))
    start = [torch.randn(box.shape, generator=torch.Generator().manual_seed(3)) for box in WHOLE]
    state.found("x", 0, WHOLE, memoryview(b"".join(codec.pack(t, torch.empty(0), "float32") for t in start)))
    for step in (1, 2):
        for site in ("x", "y"):
            body = b"".join(codec.pack(*codec.encode(torch.randn(box.shape), kind), kind) for box in WHOLE)
            state.add(site, 0, state.version, step, 10, WHOLE, memoryview(body))
        assert isinstance(state.merge("a test"), Meeting)
    from titan_fleet.swarm.outer import taken
    from titan_fleet.swarm.wire import parts

    part = [Box(0, 2, 5, 100, 290), Box(1, 0, 1, 0, 64)]
    found = [start[0][2:5, 100:290], start[1]]
    for number, (box, codes, scales) in enumerate(
        parts(memoryview(b"".join(state.updates_of(0, 2, part))), part * 2, kind, True)
    ):
        update = codec.decode(codes, scales, box.column % codec.BLOCK)
        found[number % 2] = taken(found[number % 2], update)
    assert torch.equal(found[0], state.anchor[0][2:5, 100:290]) and torch.equal(found[1], state.anchor[1])
    assert json.loads(json.dumps([vars(each) for each in state.meetings]))[1]["version"] == 2
    assert FragmentState(tmp_path, WHOLE, kind, Outer(0.7, 0.9)).version == 2


@pytest.mark.timeout(60)
def test_a_body_that_takes_longer_than_a_time_out_arrives_over_a_slow_line(folder):
    with served(folder, section(), SHARED) as (url, _):
        line = Line(int(url.rpartition(":")[2]))
        line.rate = 1.5e6
        own = link(folder, f"https://127.0.0.1:{line.port}")
        own.client.timeout = httpx.Timeout(60, write=1.0)
        begun = time.monotonic()
        own.run = own.ask("/hello", {"site": "site-0", "shared": SHARED, "streams": 8} | ALONE)["run"]
        own.ask("/join", {"run": own.run, "weights": TABLE, "step": 0, "is_new": True, "more": "x" * 4_000_000})
        assert time.monotonic() - begun > 2 and not own.is_away
