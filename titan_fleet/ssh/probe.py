"""A probe on a set of nodes: a run that measures devices and links. It gives a cluster file, which the planner reads;
here the nodes' names are added.
"""

import base64
from collections.abc import Sequence
from contextlib import suppress

import tomli
import tomli_w

from titan_fleet.node import messages
from titan_fleet.ssh.hosts import Host
from titan_fleet.ssh.parts import Job, Part, at_once, new_name
from torchtitan.refusal import Refusal

_MOST_BYTES = 2**26


def probe_of(hosts: Sequence[Host], dtype: str | None = None) -> Job:
    if len(hosts) < 2:
        raise Refusal(f"a probe of {len(hosts)} node measures no link; name two or more nodes")
    if len({host.gpus for host in hosts}) > 1:
        given = ", ".join(f"{host.host} {host.gpus}" for host in hosts)
        raise Refusal(f"the nodes have unlike gpus ({given}), and a probe needs as many ranks on each; give one number")
    return Job(new_name("probe"), "", needs_disk=False, probes=dtype or "auto")


def collect(run: str, parts: Sequence[Part]) -> str:
    """The cluster file of a probe that has ended."""
    data, is_end = b"", False
    while not is_end and len(data) < _MOST_BYTES:
        answer = parts[0].node.ask(messages.Read, run=run, path=messages.CLUSTER, position=len(data))
        data, is_end = data + base64.b64decode(answer.data), answer.is_end
    try:
        tables = tomli.loads(data.decode())
        tables["probe"]["hosts"] = [part.name for part in parts]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refusal(f"{parts[0].name} sends no cluster file ({error}); look at the run {run} there") from None
    return tomli_w.dumps(tables)


def delete(run: str, parts: Sequence[Part]) -> None:
    def one(part: Part) -> None:
        with suppress(Refusal):  # another node of the same disk was faster
            part.node.ask(messages.Delete, run=run)

    at_once(one, parts)
