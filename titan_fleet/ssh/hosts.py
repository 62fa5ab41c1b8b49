"""The machines that a person names: hosts.txt with one host a line, or nodes.toml with the same fields.

gpu1.example.org address=10.0.0.1 gpus=8        # a host as ssh knows it

[[node]]
host = "gpu1.example.org"
address = "10.0.0.1"
gpus = 8
name = "zurich"         # as a plan calls it; without one, by its host
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tomli
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from titan_fleet.node.messages import HostName, why
from titan_fleet.ssh.client import ssh_command
from torchtitan.refusal import Refusal

_FIELDS = "host, address= (in the training network), gpus= (0 trains on the CPU) and name= (of a plan)"


class Host(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str
    address: HostName | None = None
    gpus: Annotated[int, Field(ge=0, le=1024)] | None = None  # None: as run_llama_train.sh decides there
    watch: list[str] = []  # folders there, whose runs the console shows and leaves alone
    name: str = ""

    @property
    def planned_as(self) -> str:
        return self.name or self.host


def read_hosts(file: Path) -> list[Host]:
    """The hosts in the order of the file, which is the order of NODE_RANK."""
    text = file.read_text(encoding="utf-8")
    rows = _tables(file, text) if file.suffix == ".toml" else _lines(file, text)
    if hosts := [_host(place, row) for place, row in rows]:
        return hosts
    raise Refusal(f"{file} names no host; write one a line")


def in_planned_order(hosts: Sequence[Host], config: Path) -> list[Host]:
    """Those that the plan of this configuration uses, in its order; all of them where no plan has named its nodes."""
    if not (order := config.with_suffix(".nodes")).is_file():
        return list(hosts)
    by_name: dict[str, Host] = {}
    for host in hosts:
        if by_name.setdefault(host.planned_as, host) is not host:
            raise Refusal(f"two hosts are {host.planned_as}, and {order} names one; give each its own name=")
    names = order.read_text(encoding="utf-8").splitlines()
    if missing := [name for name in names if name not in by_name]:
        known = ", ".join(by_name)
        why = f"the hosts are {known}; give them these names by name=, or delete {order} to use all in their own order"
        raise Refusal(f"{order}: the plan uses {', '.join(missing)}, and {why}")
    return [by_name[name] for name in names]


def _tables(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        tables = tomli.loads(text).get("node", [])
    except ValueError as error:
        raise Refusal(f"{file} is no TOML: {error}; write [[node]] and host = ... for each machine") from None
    for number, table in enumerate(tables, 1):
        yield f"{file}, node {number}", table


def _lines(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].split():
            if bad := next((word for word in words[1:] if "=" not in word), None):
                raise Refusal(f"{file}:{number}: {bad} is no field; a line has {_FIELDS}")
            yield f"{file}:{number}", {"host": words[0]} | dict(word.split("=", 1) for word in words[1:])


def _host(place: str, row: Any) -> Host:
    try:
        host = Host.model_validate(row)
        ssh_command(host.host, [])
    except ValidationError as error:
        raise Refusal(f"{place}: {why(error)}; a machine has {_FIELDS}") from None
    except Refusal as error:
        raise Refusal(f"{place}: {error}") from None
    return host
