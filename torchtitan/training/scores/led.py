"""Lets rank 0 lead: it calls methods of an object that all ranks have, and the others make the same calls."""

import pickle
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_POLL_SECONDS = 0.01


class Led:
    """Ranks that follow wait at the store, not in a collective: rank 0 may think for longer than one may take."""

    def __init__(self, what: Any, name: str = "led") -> None:
        self.what, self._count, self._has_called = what, 0, False
        self._is_leader, self._is_alone = dist.get_rank() == 0, dist.get_world_size() == 1
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(name, store)

    def run(self, lead: Callable[[], Any]) -> Any:
        """On rank 0 what `lead` returns, elsewhere None."""
        if not self._is_leader:
            while (call := self._receive()) is not None:
                getattr(self.what, call[0])(*call[1:])
            return None
        try:
            return lead()
        finally:
            self._send(None)

    def call(self, name: str, *args: Any) -> Any:
        """Called by rank 0; the call ends with a collective, so all have read it then."""
        self._send((name, *args))
        return getattr(self.what, name)(*args)

    def _send(self, call: tuple[Any, ...] | None) -> None:
        if self._is_alone:
            return
        if self._has_called:  # what all have read need not stay
            self._store.delete_key(str(self._count))
        self._count, self._has_called = self._count + 1, call is not None
        self._store.set(str(self._count), pickle.dumps(call))  # type: ignore[arg-type]

    def _receive(self) -> tuple[Any, ...] | None:
        self._count += 1
        while not self._store.check([str(self._count)]):
            time.sleep(_POLL_SECONDS)
        call: tuple[Any, ...] | None = pickle.loads(self._store.get(str(self._count)))
        return call
