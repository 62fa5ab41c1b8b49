"""A TCP line between a site and its syncer that can be cut, slowed down and healed, and that can spoil bytes."""

import asyncio
import contextlib
import threading

PIECE = 1 << 14


class Line:
    def __init__(self, target: int) -> None:
        self.target, self.is_cut, self.rate, self.spoils = target, False, 0.0, False
        self.loop, ready = asyncio.new_event_loop(), threading.Event()
        self.port = 0
        threading.Thread(target=self._run, args=(ready,), daemon=True).start()
        ready.wait(10)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        server = self.loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        self.loop.run_forever()

    async def _serve(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, forth = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:  # no syncer there: refused, as by a machine without one
            back.transport.abort()
            return
        await asyncio.gather(self._carry(near, forth), self._carry(far, back))

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(PIECE):
                while self.is_cut:
                    await asyncio.sleep(0.05)
                if self.rate:
                    await asyncio.sleep(len(data) / self.rate)
                if self.spoils and len(data) > 1000:
                    self.spoils, data = False, data[:500] + bytes([data[500] ^ 1]) + data[501:]
                target.write(data)
                await target.drain()
        target.close()
