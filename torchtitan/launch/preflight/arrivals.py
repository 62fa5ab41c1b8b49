"""Who connects to node 0: nodes of this run, which know its secret, and strangers, who keep no node waiting."""

import contextlib
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torchtitan.launch.preflight.connection import Channel, NotANode

ANSWER_SECONDS = 30  # limit for an answer of a node that has connected
_HELLO_SECONDS = 5  # for the first messages of a node
_MOST_AT_ONCE = 64  # who connect at the same time; more wait for their turn


class Arrivals:
    """Hears everyone who connects to the listening socket, each by itself."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._listener, self._secret = listener, secret
        self._came: queue.Queue[tuple[Channel, dict[str, Any], str]] = queue.Queue()
        self.strangers: set[str] = set()  # addresses of those who do not know the secret
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self, seconds: float) -> tuple[Channel, dict[str, Any], str] | None:
        """A node's channel, its hello and its address; None if none comes in this time."""
        with contextlib.suppress(queue.Empty):
            return self._came.get(timeout=seconds)
        return None

    def about_strangers(self) -> str:
        if not self.strangers:
            return ""
        return (
            f"; {', '.join(sorted(self.strangers)[:4])} connected without the nodes' secret: give all nodes the same "
            "PREFLIGHT_SECRET, or the same run id"
        )

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends a waiting accept(), which close() does not
        self._listener.close()

    def _listen(self) -> None:
        with ThreadPoolExecutor(_MOST_AT_ONCE) as pool, contextlib.suppress(OSError):  # until `end`
            while True:
                pool.submit(self._hear, *self._listener.accept())

    def _hear(self, connection: socket.socket, source: Any) -> None:
        channel, address = Channel(connection, _HELLO_SECONDS), source[0].removeprefix("::ffff:")
        try:
            channel.prove(self._secret, leads=True)
            hello = channel.receive()
            if not isinstance(hello["preflight"], int) or not isinstance(hello["facts"]["host"], str):
                raise TypeError
        except NotANode:
            self.strangers.add(address)
            channel.close()
        except (OSError, KeyError, TypeError):  # not a member of a preflight
            channel.close()
        else:
            channel.seconds = ANSWER_SECONDS
            self._came.put((channel, hello, address))
