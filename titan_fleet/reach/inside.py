"""What happens inside the network: every other node is asked whether it is there, and the pairs are measured.

A node that is silent for too long ends the connections to it, so that a run ends with a reason and does not wait.
"""

import asyncio
import contextlib
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from titan_fleet.reach import measure
from titan_fleet.reach.peer import Peer
from titan_fleet.reach.relays import Socket
from torchtitan.refusal import Refusal

SILENT_SECONDS = 22.0  # through the tunnel, whatever the way
_ASK_SECONDS, _SETTLED_SECONDS = 2.0, 3.0


class Inside:
    def __init__(self, name: str, address: str, peers: Mapping[str, Peer], out: Path) -> None:
        self.name, self.address, self.peers, self.out = name, address, peers, out
        self.measured: object = None  # the ways that the last measurement had
        self._settled: tuple[object, float] = (None, 0.0)
        self._asked_at, self._is_measuring, self._pause = 0.0, False, _SETTLED_SECONDS

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def hand_over(found: measure.Found, origin: str) -> None:
            loop.call_soon_threadsafe(self._write, found, origin)

        try:
            self._echo = await Socket.open(self._take, self.address, measure.PORT)
            self._listener = measure.listen_for_pairs(self.address, hand_over)
        except OSError as error:
            raise Refusal(
                f"{self.address} port {measure.PORT} cannot be used: {error}; end what listens there"
            ) from None

    def close(self) -> None:
        self._echo.transport.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(2)  # wakes the thread that accepts
        self._listener.close()

    def _take(self, socket: Socket, data: bytes, origin: tuple[str, int]) -> None:
        peer = next((peer for peer in self.peers.values() if peer.address == origin[0]), None)
        if peer is None or len(data) != 1:
            return
        if data[:1] == b"?":
            socket.transport.sendto(b"!", origin)
            return
        if peer.is_silent:
            print(f"{self.name} - {peer.name}: it answers again, {peer.way}", flush=True)
        peer.heard_at, peer.is_silent = time.monotonic(), False

    def tick(self) -> None:
        now = time.monotonic()
        if now < self._asked_at + _ASK_SECONDS:
            return
        self._asked_at = now
        for peer in self.peers.values():
            if peer.way:
                self._echo.transport.sendto(b"?", (peer.address, measure.PORT))
            if now > (peer.heard_at or peer.made_at) + SILENT_SECONDS and not peer.is_silent:
                peer.is_silent = True
                self.end_connections(peer, f"has not answered for {SILENT_SECONDS:.0f} s ({peer.way or 'no way'})")
        self._measure_if_settled(now)

    def end_connections(self, peer: Peer, why: str) -> None:
        print(f"{self.name} - {peer.name}: {peer.name} {why}; connections to {peer.address} end now", flush=True)
        subprocess.run(["ss", "-K", "dst", peer.address], capture_output=True)

    def _measure_if_settled(self, now: float) -> None:
        """By the node with the smallest address, once all pairs work and nothing has changed for some seconds."""
        here = self._here()
        ways = sorted((peer.name, peer.way, peer.public) for peer in here)
        if ways != self._settled[0]:
            self._settled = ways, now
        leads = all(peer.leads_over for peer in here) and bool(ways)
        works = all(peer.heard_at for peer in here)
        if leads and works and now > self._settled[1] + _SETTLED_SECONDS and ways != self.measured:
            if not self._is_measuring:
                self._is_measuring, self.measured = True, ways
                threading.Thread(target=self._measure, daemon=True).start()

    def _here(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if not peer.is_silent]

    def addresses(self) -> dict[str, str]:
        """Of this node and those that answer; the first leads the measurement."""
        both = [(self.name, self.address), *((peer.name, peer.address) for peer in self._here())]
        return dict(sorted(both, key=lambda pair: tuple(map(int, pair[1].split(".")))))

    def _measure(self) -> None:
        try:
            measure.measure_all(self.addresses())
            self._pause = _SETTLED_SECONDS
        except (OSError, KeyError, TypeError, ValueError) as error:
            print(f"{self.name}: the pairs could not be measured ({error}); they are tried again", flush=True)
            time.sleep(self._pause)
            self.measured, self._pause = None, min(60.0, 2 * self._pause)
        finally:
            self._is_measuring = False

    def _write(self, found: measure.Found, origin: str) -> None:
        try:
            if origin != (leader := next(iter(self.addresses().values()))):
                raise ValueError(f"{origin} sent it, and {leader} leads")
            names = [str(name) for name in found["names"]]
            lines = []
            for peer in self._here():
                own, other = names.index(self.name), names.index(peer.name)
                there, back = (1e3 * found["gbit"][a][b] for a, b in ((own, other), (other, own)))
                rates = f"{found['delay_ms'][own][other]:.1f} ms, {there:.0f} Mbit/s there and {back:.0f} back"
                by = peer.used if peer.way == "through" else "the serving machine"
                cost = "" if peer.way == "direct" else f"; every byte passes {by}"
                lines.append(f"{self.name} - {peer.name}: {peer.way}, {rates}{cost}")
            files = measure.write_files(self.out, found, self.addresses(), lines)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            print(f"{self.name}: the result of another node is none of ours ({error})", flush=True)
            return
        except OSError as error:
            print(f"{self.name}: {self.out} could not be written: {error.strerror}; the network stays up", flush=True)
            return
        print("\n".join([*lines, f"written: {', '.join(map(str, files))}"]), flush=True)
