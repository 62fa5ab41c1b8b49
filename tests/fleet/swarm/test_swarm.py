"""Sites of a swarm, each a run of its own with its own layout, around one syncer."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.fleet.swarm.served import keys, served
from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.recipe.distributed.differences import differences
from tests.tiny_runs import read_records, tiny_config
from titan_fleet.swarm.identity import shared

Layout = tuple[int, dict[str, Any]]  # ranks, and what differs from the others
ONE: Layout = (1, {})
TWO_STEPS: dict[str, Any] = {"swarm__every": 4, "swarm__fragments": 2, "swarm__delay": 1, "swarm__codec": "int8"}


@contextlib.contextmanager
def swarm(
    folder: Path, ranks: Ranks, layouts: list[Layout], syncers: int = 1, **more: Any
) -> Iterator[Callable[[], list[Any]]]:
    """What it yields trains all sites, each in its folder site-N, and returns their records. All wait for all."""
    if not (folder / "keys").exists():
        keys(folder, len(layouts))
    own = {"swarm__sites": len(layouts), "swarm__quorum": len(layouts)} | more
    section = tiny_config(folder, **own)
    with contextlib.ExitStack() as stack:
        servers = [served(folder, section.swarm, shared(section), out=f"syncer-{n}") for n in range(syncers)]
        urls = [stack.enter_context(server)[0] for server in servers]

        def train(*, only: int | None = None, **changed: Any) -> list[Any]:
            sites, stores, first = [], [], 0
            for number, (count, layout) in enumerate(layouts):
                if only not in (None, number):
                    continue
                stores.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
                name = f"site-{number}"
                place = {"swarm__syncers": urls, "swarm__site": name, "swarm__keys": str(folder / "keys" / name)}
                overrides = own | place | layout | changed
                sites.append(cases.Site(first, count, stores[-1].port, str(folder / name), overrides))
                first += count
            answers = ranks(cases.train_at_sites, first, sites)
            return [answers[site.first] for site in sites]

        yield train


def meetings(folder: Path, site: int) -> dict[tuple[int, int], int]:
    lines = read_records(folder / f"site-{site}", "swarm.jsonl")
    return {(line["fragment"], line["version"]): line["checksum"] for line in lines}


def test_meetings_after_every_step_are_data_parallelism(ranks: Ranks, tmp_path: Path) -> None:
    """Plain SGD inside, the mean of all sites outside: each step is that of one run on the batches of all."""
    plain = {"model__name": "tests.recipe.own_model.any_models:PLAIN_SGD", "training__max_norm": float("inf")}
    plain |= {"training__num_streams": 4, "training__global_batch_size": 4, "training__local_batch_size": 4}
    every = {"swarm__every": 1, "swarm__fragments": 1, "swarm__delay": 0, "swarm__codec": "float32"}
    with swarm(tmp_path, ranks, [ONE, ONE], **plain, **every, swarm__method="average") as train:
        one, other = train()
    both = {"training__num_streams": 8, "training__global_batch_size": 8}
    (together,) = ranks(cases.train, 1, str(tmp_path / "together"), plain | both)
    mean = [a | {"loss": (a["loss"] + b["loss"]) / 2} for a, b in zip(one, other, strict=True)]
    assert differences(mean, together, "loss") < 1e-5 and together[-1]["loss"] < together[0]["loss"]


def test_sites_of_unlike_layouts_hold_the_same_anchor_after_each_meeting(ranks: Ranks, tmp_path: Path) -> None:
    """And learn what sites of one process learn."""
    pp, tp = "parallelism__pipeline_parallel_degree", "parallelism__tensor_parallel_degree"
    uneven = {pp: 2, tp: 2, "parallelism__pipeline_parallel_schedule": "1F1B"}
    uneven |= {"parallelism__pipeline_parallel_layer_counts": [3, 1]}
    hybrid = {"parallelism__data_parallel_replicate_degree": 2, "training__local_batch_size": 2}
    short = TWO_STEPS | {"training__steps": 6}
    layouts: list[Layout] = [(4, uneven), (4, hybrid)]
    with swarm(tmp_path, ranks, layouts, syncers=2, **short) as train:
        unlike = train()
    with swarm(tmp_path / "alike", ranks, [ONE, ONE], **short) as train:
        alike = train()
    for ours, theirs in zip(unlike, alike, strict=True):
        assert differences(ours, theirs, "loss") < 1e-3  # where rounding to int8 falls on another side
    assert "meeting 2, 2 of 2, step 6" in (tmp_path / "site-0/swarm.svg").read_text()
    assert len(meetings(tmp_path, 0)) == 4
    for folder in (tmp_path, tmp_path / "alike"):
        assert meetings(folder, 0) == meetings(folder, 1)


def test_a_swarm_that_waits_for_all_repeats_and_resumes_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    saving = {"checkpoint__enable": True, "checkpoint__interval": 3, "checkpoint__keep_latest_k": 0}
    saving |= TWO_STEPS | {"swarm__delay": 2, "lr_scheduler__total_steps": 14}
    with swarm(tmp_path / "once", ranks, [ONE, ONE], **saving) as train:
        whole = train()
        expected = meetings(tmp_path / "once", 0)
    resumed = tmp_path / "resumed"
    with swarm(resumed, ranks, [ONE, ONE], **saving) as train:
        train()
        assert meetings(resumed, 0) == expected  # a second run
    for site in (0, 1):  # both sites fall back, to steps at which fragments travelled, and the syncer starts again
        for step in (6, 9, 10)[site:]:
            shutil.rmtree(resumed / f"site-{site}/checkpoint/step-{step}")
    with swarm(resumed, ranks, [ONE, ONE], **saving) as train:
        for ours, theirs in zip(train(), whole, strict=True):
            assert [line["loss"] for line in ours[-4:]] == [line["loss"] for line in theirs[-4:]]
    assert meetings(resumed, 0) == meetings(resumed, 1) == expected
    for name in ("version-3", "update-2"):
        (resumed / f"syncer-0/fragment-0/{name}.safetensors").unlink()
    with swarm(resumed, ranks, [ONE, ONE], **saving) as train:  # an older copy of the syncer's folder
        with pytest.raises(AssertionError, match="anchor 3 of fragment 0, and this syncer's newest is 2"):
            train(only=0, training__steps=14)


def test_a_site_that_comes_late_begins_where_the_run_is_with_documents_of_its_own(ranks: Ranks, tmp_path: Path) -> None:
    loose = TWO_STEPS | {"swarm__quorum": 1, "swarm__grace_seconds": 0.0, "lr_scheduler__total_steps": 14}
    with swarm(tmp_path, ranks, [ONE, ONE], **loose) as train:
        (first,) = train(only=0)
        (late,) = train(only=1, training__steps=14)
    assert len(first) == 10 and late[0]["step"] in (9, 11)  # after the first site's last meeting but one, or its last
    assert late[0]["lr"] < 0.1 * first[1]["lr"]  # the optimizer's moments are empty
    assert late[0]["loss"] < first[0]["loss"] - 1
    assert not set(meetings(tmp_path, 0)) & set(meetings(tmp_path, 1))


def test_a_site_with_another_tokenizer_or_other_frozen_weights_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    file = shutil.copytree("tests/assets/tokenizer", tmp_path / "other") / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    loose = TWO_STEPS | {"swarm__quorum": 1, "swarm__grace_seconds": 0.0, "training__steps": 4}
    saving = {"checkpoint__enable": True, "training__train_only": ["layers"]}
    with swarm(tmp_path, ranks, [ONE, ONE], **loose, **saving) as train:
        train(only=0)
        says = "site site-1 has other files than the site that began the run.*: {} .SHA-256 .* in the run.; copy them"
        with pytest.raises(AssertionError, match=says.format("tokenizer")):
            train(only=1, model__hf_assets_path=str(file.parent))
        with pytest.raises(AssertionError, match=says.format("frozen weights")):
            train(only=1, checkpoint__initial_load_path=str(tmp_path / "site-0/checkpoint"))
        train(only=1)


def test_sites_begin_with_the_weights_that_they_were_told_to_load(ranks: Ranks, tmp_path: Path) -> None:
    saving = {"checkpoint__enable": True, "checkpoint__interval": 20, "training__steps": 20}
    (plain,) = ranks(cases.train, 1, str(tmp_path / "plain"), saving)
    warm = {"checkpoint__enable": True, "checkpoint__initial_load_path": str(tmp_path / "plain/checkpoint")}
    with swarm(tmp_path, ranks, [ONE, (2, {"training__local_batch_size": 4})], **TWO_STEPS, **warm) as train:
        for site in train():
            assert site[0]["loss"] < plain[0]["loss"] - 1
    assert meetings(tmp_path, 0) == meetings(tmp_path, 1)


def test_another_seed_is_refused_before_a_step(ranks: Ranks, tmp_path: Path) -> None:
    with swarm(tmp_path, ranks, [ONE, ONE], **TWO_STEPS) as train:
        with pytest.raises(AssertionError, match="debug.seed = 7, but the swarm has 0; leave it out here"):
            train(debug__seed=7)


def test_sites_that_meet_by_time_take_turns_with_all_fragments(ranks: Ranks, tmp_path: Path) -> None:
    by_time = TWO_STEPS | {"swarm__every_seconds": 0.3, "training__steps": 40, "swarm__grace_seconds": 0.5}
    with swarm(tmp_path, ranks, [(2, {"training__local_batch_size": 4}), ONE], **by_time, swarm__quorum=1) as train:
        train()
    for site in (0, 1):
        assert {fragment for fragment, _ in meetings(tmp_path, site)} == {0, 1}
    common = set(meetings(tmp_path, 0)) & set(meetings(tmp_path, 1))
    assert all(meetings(tmp_path, 0)[each] == meetings(tmp_path, 1)[each] for each in common)
