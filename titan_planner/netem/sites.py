"""The inside of `python -m torchtitan netem`: the first process of its own namespaces; each site is one more.

The kernel ends all others when this process ends, so nothing is left however that happens.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_planner.netem import relay
from titan_planner.netem.measure import Link, measure, sample
from titan_planner.netem.namespaces import inside
from torchtitan.launch.node import SECONDS_TO_END
from torchtitan.refusal import Refusal

_SECONDS_TO_SAVE = 120
_DEVICE = "eth0"
# Its own host name, and memory that it shares with no other site: ranks on a CPU would exchange through that.
_AS_SITE = 'echo "$0" > /proc/sys/kernel/hostname && { [ ! -d /dev/shm ] || mount -t tmpfs shm /dev/shm; } && exec "$@"'


@dataclass(frozen=True)
class Sites:
    """What to emulate and what to run there; delay in seconds and rate in bits a second, from each site to each."""

    names: Sequence[str]
    delay: Sequence[Sequence[float]]
    rate: Sequence[Sequence[float]]
    order: Sequence[int]  # of which site is which node
    measured: int  # links; 0: all
    anyway: bool
    port: int
    command: Sequence[str]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def addresses(self) -> list[str]:
        return [f"10.77.{number // 250}.{number % 250 + 1}" for number in range(len(self.names))]

    @property
    def namespaces(self) -> list[str]:
        return [f"site{number}" for number in range(len(self.names))]

    def environment(self, rank: int) -> dict[str, str]:
        others = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        kept = {k: v for k, v in os.environ.items() if k not in others and not k.startswith("PET_")}
        threads = str(max(1, (os.cpu_count() or 1) // len(self.names)))
        place = {"NNODES": str(len(self.names)), "NODE_RANK": str(rank), "NGPU": "1", "MASTER_PORT": str(self.port)}
        place |= {"MASTER_ADDR": self.addresses[self.order[0]], "SITE": self.names[self.order[rank]]}
        return (
            {"OMP_NUM_THREADS": threads} | kept | place | {f"{lib}_SOCKET_IFNAME": _DEVICE for lib in ("GLOO", "NCCL")}
        )


def set_up(sites: Sites) -> None:
    """Make the namespaces, join them, and shape what each sends to each."""
    names = "".join(f"{a} {name}\n" for a, name in zip(sites.addresses, sites.names, strict=True))
    _run("mount", "-t", "tmpfs", "tmpfs", "/run")
    Path("/run/netns").mkdir()
    Path("/run/hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
    _run("mount", "--bind", "/run/hosts", "/etc/hosts")
    _run("ip", "link", "set", "lo", "up")
    kernel_delays = not subprocess.run(
        ["tc", "qdisc", "add", "dev", "lo", "root", "netem"], capture_output=True
    ).returncode
    relayed = not kernel_delays and any(map(any, sites.delay))
    if relayed and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise Refusal(
            "this kernel has no netem, and without /dev/net/tun nothing else can delay packets; load one of them "
            "(modprobe sch_netem, modprobe tun), in a container give it the device"
        )
    if not relayed:
        _run("ip", "link", "add", "bridge", "type", "bridge")
        _run("ip", "link", "set", "bridge", "up")
    devices = {}
    for number, (name, address) in enumerate(zip(sites.namespaces, sites.addresses, strict=True)):
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        if relayed:
            with inside(name):
                devices[address] = relay.open_device(_DEVICE)
        else:
            _run(*f"ip link add {name} type veth peer name {_DEVICE} netns {name}".split())
            _run(*f"ip link set {name} master bridge up".split())
        _run(*f"ip -n {name} address add {address}/16 dev {_DEVICE}".split())
        _run(*f"ip -n {name} link set {_DEVICE} up".split())
        _shape(sites, number, kernel_delays)
    if relayed:
        delays = dict(zip(sites.addresses, sites.delay, strict=True))
        relay.start(
            {
                devices[a]: {b: (devices[b], delays[a][j]) for j, b in enumerate(sites.addresses) if a != b}
                for a in sites.addresses
            }
        )


def _shape(sites: Sites, number: int, kernel_delays: bool) -> None:
    """One HTB class for each other site; TCP may fill a link that is long and wide."""
    name, lines, longest = sites.namespaces[number], [f"qdisc replace dev {_DEVICE} root handle 1: htb"], 0
    for other, address in enumerate(sites.addresses):
        if other != number:
            delay, rate = sites.delay[number][other], sites.rate[number][other]
            on_the_way = min(1 << 29, int((2 * delay + 0.1) * rate / 8))
            longest = max(longest, on_the_way)
            lines += shaping(f"dev {_DEVICE}", other + 1, rate, delay if kernel_delays else 0.0, on_the_way)
            match = f"protocol ip prio 1 u32 match ip dst {address}/32 flowid 1:{other + 1:x}"
            lines.append(f"filter add dev {_DEVICE} parent 1: {match}")
    _run("tc", "-n", name, "-batch", "-", text="\n".join(lines) + "\n")
    with inside(name):
        for file, usual in (("tcp_rmem", 33 << 20), ("tcp_wmem", 4 << 20)):
            with contextlib.suppress(OSError):  # an old kernel has one for all namespaces
                Path(f"/proc/sys/net/ipv4/{file}").write_text(f"4096 131072 {max(usual, 4 * longest)}")


def shaping(device: str, number: int, rate: float, delay: float, room: int) -> list[str]:
    """Commands of tc: a class of the HTB `1:` with this rate, and behind it a queue for so many bytes, or netem."""
    burst = max(3000, int(rate / 8 / 1000))
    leaf = (
        f"netem delay {delay * 1e6:.0f}us limit {max(1000, room // 500)}"
        if delay
        else f"bfifo limit {max(room, 64 << 10)}"
    )
    return [
        f"class add {device} parent 1: classid 1:{number:x} htb rate {rate:.0f}bit burst {burst} cburst {burst} "
        "quantum 3000",
        f"qdisc add {device} parent 1:{number:x} {leaf}",
    ]


def check(sites: Sites) -> None:
    """Print asked beside measured, and refuse to go on if a link is off."""
    found: list[Link] = []
    wide = max(map(len, sites.names))
    print(f"{'from':{wide}}  {'to':{wide}}  delay asked, measured        rate asked, measured", flush=True)
    for link in sample(sites.delay, sites.rate, sites.measured):
        link = measure(link, sites.namespaces, sites.addresses)
        (delay, rate), (delay_found, rate_found) = link.asked, link.measured
        said = f"{delay * 1e3:9.2f} ms {delay_found * 1e3:9.2f} ms"
        said += f"  {rate / 1e6:9.2f} Mbit/s {rate_found / 1e6:9.2f} Mbit/s"
        note = "" if link.off <= 1 else "  off"
        print(f"{sites.names[link.origin]:{wide}}  {sites.names[link.target]:{wide}}  {said}{note}", flush=True)
        found.append(link)
    off, links = [link for link in found if link.off > 1], len(sites.names) * (len(sites.names) - 1)
    print(f"{len(found)} of {links} links measured, {len(off)} more than 10 % (or 0.25 ms) off", flush=True)
    if off and not sites.anyway:
        worst = max(off, key=lambda link: link.off)
        raise Refusal(
            f"the link from {sites.names[worst.origin]} to "
            f"{sites.names[worst.target]} is not as asked; "
            "this machine is too busy or too slow for it: give it a smaller --rate_factor, or go on with --anyway"
        )


class Commands:
    """COMMAND at every site."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}  # process -> node
        self.codes: dict[int, int] = {}  # node -> exit code, in the order of their ends
        self.deadline = float("inf")
        self.readers: list[threading.Thread] = []
        self.kept: list[subprocess.Popen[bytes]] = []  # a Popen that is forgotten takes the exit code with it

    def start(self, sites: Sites) -> None:
        wide = max(map(len, sites.names))
        for rank, site in enumerate(sites.order):
            words = ["ip", "netns", "exec", sites.namespaces[site], "unshare", "--uts", "sh", "-c", _AS_SITE]
            process = subprocess.Popen(
                [*words, sites.names[site], *sites.command],
                env=sites.environment(rank),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.kept.append(process)
            self.running[process.pid] = rank
            prefix = f"{rank:>{len(str(len(sites.order)))}} {sites.names[site]:{wide}} | ".encode()
            self.readers.append(threading.Thread(target=_show, args=(process, prefix), daemon=True))
            self.readers[-1].start()

    def wait(self) -> int:
        """The exit code of the command that failed first, or 0."""
        while self.running and time.monotonic() < self.deadline:
            process, status = os.waitpid(-1, os.WNOHANG)  # also the orphans of commands, for which this is init
            if process == 0:
                time.sleep(0.02)
            elif process in self.running:
                code = os.waitstatus_to_exitcode(status)
                self.codes[self.running.pop(process)] = code if code >= 0 else 128 - code
                if code:
                    self.deadline = min(self.deadline, time.monotonic() + SECONDS_TO_END)
        for reader in self.readers:
            reader.join(1)
        if self.running:
            print(
                f"nodes {', '.join(map(str, sorted(self.running.values())))} were still running and end now", flush=True
            )
        return next(filter(None, self.codes.values()), 1 if self.running else 0)

    def stop(self, number: int) -> None:
        """Pass a signal on; a second one, or one before the commands run, ends all at once."""
        if not self.running or self.deadline < float("inf"):
            os._exit(128 + number)
        self.deadline = time.monotonic() + _SECONDS_TO_SAVE
        for process in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, number)


def _show(process: "subprocess.Popen[bytes]", prefix: bytes) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        os.write(1, prefix + line)


def _obey(commands: Commands) -> None:
    """The outside sends signals as numbers, and its end as the end of the file."""
    for line in sys.stdin:
        commands.stop(int(line))
    os._exit(128 + signal.SIGKILL)


def _run(*words: str, text: str | None = None) -> None:
    done = subprocess.run(words, input=text, stdin=None if text else subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise Refusal(f"{' '.join(words)}: {done.stderr.strip()}; this kernel lacks what an emulated network needs")


def main() -> int:
    about: Mapping = json.loads(sys.stdin.readline())
    sites, commands = Sites(**about), Commands()
    threading.Thread(target=_obey, args=(commands,), daemon=True).start()
    try:
        set_up(sites)
        check(sites)
        commands.start(sites)
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return commands.wait()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
