"""Checkpoints in a store that speaks S3: a real server of that language on loopback, and ranks that write to it."""

import logging.handlers
import os
import re
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.recipe.distributed.test_layouts import LAYOUTS
from tests.tiny_runs import read_records
from torchtitan.checkpoint.manager import SaveError
from torchtitan.checkpoint.storage import Manifest, Storage
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

pytestmark = pytest.mark.skipif(not (find_spec("s3fs") and find_spec("moto")), reason="needs s3fs and moto[server]")
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


class Server:
    """Keeps what it was given while it is away."""

    def __init__(self) -> None:
        self.port = 0
        self.start()
        self.environment = KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_MAX_ATTEMPTS": "1"}

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """With a bucket `runs`."""
    import s3fs

    server = Server()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdirs("runs", exist_ok=True)
    yield server
    server.stop()


def train_with(rank: int, world_size: int, environment: dict[str, str], *args: Any) -> str:
    """Training as in a new process; the errors that it has told."""
    import s3fs

    os.environ |= environment
    s3fs.S3FileSystem.clear_instance_cache()
    told = logging.handlers.BufferingHandler(1000)
    told.setLevel(logging.ERROR)
    logger.addHandler(told)
    try:
        cases.train(rank, world_size, *args)
        ended = ""
    except (OSError, SaveError, Refusal) as error:
        ended = str(error)
    finally:
        logger.removeHandler(told)
        for name in environment:
            del os.environ[name]
    return "\n".join([*(record.getMessage() for record in told.buffer), ended])


def test_a_run_saves_to_s3_and_goes_on_from_there_past_what_was_damaged(
    ranks: Ranks, tmp_path: Path, server: Server
) -> None:
    world_size, keys = LAYOUTS["FSDP 2"]
    keys = keys | {"lr_scheduler__total_steps": 8}
    through = ranks(cases.train, world_size, str(tmp_path / "through"), keys | {"training__steps": 8})[0]
    saving: dict[str, Any] = {
        "checkpoint__enable": True,
        "checkpoint__folder": "s3://runs/one/checkpoint",
        "checkpoint__interval": 2,
        "checkpoint__async_mode": "async",
    }
    parted = str(tmp_path / "parted")
    ranks(
        train_with,
        world_size,
        server.environment,
        parted,
        keys | saving | {"training__steps": 6, "checkpoint__keep_latest_k": 2},
    )
    storage = Storage("s3://runs/one/checkpoint")
    assert storage.steps() == [6, 4]  # 2 is not kept
    file = f"{storage.folder(6)}/__1_0.distcp"
    storage.fs.pipe_file(file, storage.fs.cat_file(file)[:-1])
    assert re.search("__1_0.distcp has .* the manifest says", str(storage.examine(6)))
    ranks(train_with, world_size, server.environment, parted, keys | saving | {"training__steps": 8})
    exact = [
        [(r["step"], r["loss"], r["grad_norm"]) for r in records] for records in (through, read_records(Path(parted)))
    ]
    assert exact[0] == exact[1]
    assert storage.steps() == [8, 6, 4] and isinstance(storage.examine(6), Manifest)  # saved anew


def test_a_store_that_goes_away_costs_no_step_and_is_said(ranks: Ranks, tmp_path: Path, server: Server) -> None:
    world_size, keys = LAYOUTS["FSDP 2"]
    keys = keys | {"checkpoint__enable": True, "checkpoint__folder": "s3://runs/two", "checkpoint__interval": 2}

    def leave() -> None:
        while 2 not in Storage("s3://runs/two").steps():
            time.sleep(0.02)
        server.stop()

    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    errors = ranks(train_with, world_size, server.environment, str(tmp_path), keys)
    leaving.join()
    for error in errors:
        assert "the checkpoint of the last step, 10, could not be saved" in error
    assert [r["step"] for r in read_records(tmp_path)] == list(range(1, 11))
    assert "failed: " in errors[0] and "Could not connect to the endpoint" in errors[0]
    for error in ranks(train_with, world_size, server.environment, str(tmp_path), keys):
        assert "Could not connect to the endpoint" in error  # nothing to go on from is told from no answer
    server.start()
    ranks(train_with, world_size, server.environment, str(tmp_path), keys)
    assert [r["step"] for r in read_records(tmp_path)] == list(range(1, 11))
    assert isinstance(Storage("s3://runs/two").examine(10), Manifest)
