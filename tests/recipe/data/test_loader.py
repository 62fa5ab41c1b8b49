"""The loader: the same global batches on every layout, after every resume, and a clean end."""

import gzip
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from tests.recipe.data.small_corpus import BOS, EOS, ByteTokenizer, equal, make_texts, small_loader, take, write_jsonl
from torchtitan.data.texts import sharded_cursor
from torchtitan.models.spec import IGNORED


@pytest.fixture
def path(tmp_path):
    return write_jsonl(tmp_path / "train.jsonl", make_texts(200))


@pytest.fixture
def sharded_path(tmp_path, monkeypatch):
    """Three compressed files, which can only be read forwards, in several blocks each."""
    monkeypatch.setattr(sharded_cursor, "SHUFFLE_BLOCK", 8)
    texts = make_texts(200)
    for number in range(3):
        with gzip.open(tmp_path / f"{number}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts[number::3])
    return str(tmp_path / "*.gz")


def global_batches(loaders, num_streams, count):
    """Puts the ranks' parts together by slot."""
    dp_size, batches = len(loaders), []
    for _ in range(count):
        parts = [loader.next() for loader in loaders]
        assert all(part is not None for part in parts)
        rows = dict(
            zip([s for part in parts for s in part.origin.slots], torch.cat([p.inputs for p in parts]), strict=True)
        )
        batches.append(torch.stack([rows[slot] for slot in range(len(rows))]))
        own = num_streams // dp_size
        for rank, part in enumerate(parts):
            assert {slot % num_streams for slot in part.origin.slots} == set(range(rank * own, (rank + 1) * own))
    return batches


def ranks(path, dp_size, **options):
    return [small_loader(path, dp_rank=rank, dp_size=dp_size, **options) for rank in range(dp_size)]


@pytest.mark.parametrize("kind", ["path", "sharded_path"])
@pytest.mark.parametrize("num_streams", [4, 8])
def test_the_global_batches_are_the_same_on_1_2_and_4_ranks(request, kind, num_streams):
    path = request.getfixturevalue(kind)
    one, two, four = (
        global_batches(ranks(path, dp, num_streams=num_streams, epochs=-1), num_streams, 60) for dp in (1, 2, 4)
    )
    assert equal(one, two) and equal(one, four)


@pytest.mark.parametrize("kind", ["path", "sharded_path"])
def test_a_state_handed_from_4_ranks_to_2_goes_on_with_the_same_global_batches(request, kind):
    path = request.getfixturevalue(kind)
    uninterrupted = global_batches(ranks(path, 1, num_streams=4, epochs=-1), 4, 70)
    for stopped_at in (0, 1, 11, 33, 50):
        before = ranks(path, 4, num_streams=4, epochs=-1)
        batches = global_batches(before, 4, stopped_at)
        states = [loader.state_dict() for loader in before]
        state = states[0] | {"streams": {n: stream for state in states for n, stream in state["streams"].items()}}
        after = ranks(path, 2, num_streams=4, epochs=-1)
        for loader in after:
            loader.load_state_dict(state)
        assert equal(batches + global_batches(after, 4, 70 - stopped_at), uninterrupted)


def test_the_state_is_of_the_batches_returned_and_not_of_those_read_ahead(path):
    loader = small_loader(path, epochs=-1)
    take(loader, 3)
    state = loader.state_dict()
    time.sleep(0.2)
    assert loader.state_dict() == state
    resumed = small_loader(path, epochs=-1)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert equal(take(resumed, 5), take(loader, 5))


def plain(value):
    """Whether JSON and PyTorch's checkpoints give it back as it was."""
    if type(value) is dict:
        return all(type(key) is str and plain(held) for key, held in value.items())
    return all(map(plain, value)) if type(value) is list else value is None or type(value) in (int, float, str, bool)


@pytest.mark.parametrize("kind", ["path", "sharded_path"])
def test_a_state_survives_json_and_pytorchs_checkpoints(request, kind):
    path = request.getfixturevalue(kind)
    options = {"epochs": -1, "dp_rank": 1, "dp_size": 2}
    for num_batches in (0, 9):
        loader = small_loader(path, **options)
        take(loader, num_batches)
        state = loader.state_dict()
        assert plain(state)
        expected = take(loader, 9)
        in_checkpoint = unflatten_state_dict(*flatten_state_dict({"loader": state}))["loader"]
        for saved in (json.loads(json.dumps(state)), in_checkpoint):
            assert saved == state
            resumed = small_loader(path, **options)
            resumed.load_state_dict(saved)
            assert equal(take(resumed, 9), expected)


@pytest.mark.parametrize("kind", ["path", "sharded_path"])
def test_a_run_resumed_with_fewer_epochs_ends_with_the_one_it_is_in(request, kind):
    path = request.getfixturevalue(kind)
    loader = small_loader(path, epochs=2)
    uninterrupted = take(loader)
    begun = small_loader(path, epochs=3)
    take(begun, len(uninterrupted) - 3)
    assert {state["cursors"][0][0] for state in begun.state_dict()["streams"].values()} == {1}
    resumed = small_loader(path, epochs=1)
    resumed.load_state_dict(begun.state_dict())
    assert equal(take(resumed), uninterrupted[-3:])


def test_changed_weights_hold_from_where_a_run_is_resumed(tmp_path, caplog):
    caplog.set_level(logging.INFO, "torchtitan")
    paths = [write_jsonl(tmp_path / f"{c}.jsonl", [c * (20 + i % 9) for i in range(90)]) for c in "ab"]
    loader = small_loader(*paths, weights=[0.9, 0.1], epochs=-1)
    take(loader, 200)
    state = loader.state_dict()
    same = small_loader(*paths, weights=[9.0, 1.0], epochs=-1)
    same.load_state_dict(state)
    assert equal(take(same, 5), take(loader, 5)) and "shares" not in caplog.text
    third = write_jsonl(tmp_path / "c.jsonl", ["c"] * 90)
    mixed = small_loader(*paths, third, weights=[4.0, 1.0, 1.0])
    older = {"weights": [0.666666667, 0.166666667, 0.166666667]}  # shares of nine digits, which make more than 1
    mixed.load_state_dict(mixed.state_dict() | older)
    assert "shares" not in caplog.text
    resumed = small_loader(*paths, weights=[0.5, 0.5], epochs=-1)
    resumed.load_state_dict(state)
    assert "shares change from [0.9, 0.1] to [0.5, 0.5]" in caplog.text
    batches = take(resumed, 20)
    uninterrupted = small_loader(*paths, weights=[0.9, 0.1], epochs=-1)
    take(uninterrupted, 200)
    begin = take(uninterrupted, 1)[0][:, :2]
    assert torch.equal(batches[0][:, :2], begin), "the documents under way are read to their ends"
    tokens = Counter(torch.cat([batch[:, :-1] for batch in batches]).flatten().tolist())
    assert abs(tokens[ord("a")] / (tokens[ord("a")] + tokens[ord("b")]) - 0.5) < 0.03


def test_changed_weights_find_the_document_under_way_where_sources_lag_alike(tmp_path):
    paths = [write_jsonl(tmp_path / f"{c}.jsonl", [c * 40] * 9) for c in "ab"]
    options = {"num_streams": 1, "global_batch_size": 1, "epochs": -1}
    uninterrupted = small_loader(*paths, weights=[1.0, 2.0], **options)
    for _ in range(9):
        resumed = small_loader(*paths, weights=[1.0, 1.0], **options)
        resumed.load_state_dict(uninterrupted.state_dict())
        assert torch.equal(take(resumed, 1)[0][:, :2], take(uninterrupted, 1)[0][:, :2])


def test_a_state_is_small(path):
    loader = small_loader(path, epochs=-1)
    take(loader, 5)
    assert len(json.dumps(loader.state_dict()["streams"]["0"])) < 200


def test_a_resumed_run_keeps_the_order_it_was_begun_with(path, caplog):
    caplog.set_level(logging.INFO, "torchtitan")
    loader = small_loader(path, epochs=-1, seed=1)
    take(loader, 20)
    resumed = small_loader(path, epochs=-1, seed=2)
    resumed.load_state_dict(loader.state_dict())
    assert equal(take(resumed, 30), take(loader, 30))
    assert "order of seed 1; this run's seed, 2, is not used" in caplog.text


@pytest.mark.parametrize("kind", ["path", "sharded_path"])
@pytest.mark.parametrize("block_causal", [False, True])
def test_every_token_is_a_label_exactly_once_in_an_epoch(request, kind, block_causal):
    loader = small_loader(request.getfixturevalue(kind), any_says_so=bool, block_causal=block_causal)
    labels = Counter()
    while (batch := loader.next()) is not None:
        labels.update(batch.labels.flatten().tolist())
    del labels[IGNORED]
    tokens = Counter(token for text in make_texts(200) for token in ByteTokenizer().encode(text, True, True))
    if block_causal:
        del tokens[BOS]  # across a document's start there is nothing to predict
    else:
        tokens[BOS] -= 8  # nothing precedes a stream's first token
    assert labels == tokens


def documents_in_order(batches):
    """Of loaders with one stream: the names of the documents, as they begin."""
    flat = [token for batch in batches for row in batch for token in row[:-1].tolist()]
    text = "".join(chr(token) if token < 256 else "\n" for token in flat)
    return [line.split(":")[0] for line in text.split("\n") if ":" in line]


@pytest.mark.parametrize("kind", ["path", "sharded_path"])
def test_epochs_are_complete_reshuffled_and_logged_once(request, kind, caplog):
    caplog.set_level(logging.INFO, "torchtitan")
    path = request.getfixturevalue(kind)
    loader = small_loader(path, epochs=3, num_streams=1, global_batch_size=1)
    names = documents_in_order(take(loader))
    first, second = names[:200], names[200:400]
    assert sorted(first) == sorted(second) == sorted(f"d{i}" for i in range(200))
    assert first != second and first != [f"d{i}" for i in range(200)]
    begun = [record.message for record in caplog.records if "begins" in record.message]
    assert begun == [f"epoch {n} of {path} begins, in a new order" for n in (2, 3)]
    caplog.clear()
    take(small_loader(path, epochs=2))
    assert sum("epoch 2" in record.message for record in caplog.records) <= 1


def test_without_shuffle_documents_come_in_file_order(path):
    loader = small_loader(path, epochs=2, num_streams=1, global_batch_size=1, shuffle=False)
    assert documents_in_order(take(loader))[:400] == [f"d{i}" for i in range(200)] * 2


class Ranks:
    """Ranks as threads; `agree` is a real exchange between them."""

    def __init__(self, size, reduce):
        self.barrier, self.votes, self.reduce = threading.Barrier(size, timeout=20), [False] * size, reduce

    def agree(self, rank):
        def exchange(ready):
            self.votes[rank] = ready
            self.barrier.wait()
            answer = self.reduce(self.votes)
            self.barrier.wait()
            return answer

        return exchange


def run_ranks(path, dp_size, reduce, **options):
    group, batches = Ranks(dp_size, reduce), {}

    def work(rank):
        agree, batches[rank] = group.agree(rank), []
        if reduce is max:  # validation: the loader itself agrees with the others
            loader = small_loader(path, dp_rank=rank, dp_size=dp_size, any_says_so=agree, **options)
            while (batch := loader.next()) is not None:
                batches[rank].append(batch)
            return
        loader = small_loader(path, dp_rank=rank, dp_size=dp_size, **options)
        while agree((batch := loader.next()) is not None):
            batches[rank].append(batch)
        before = loader.state_dict()
        loader.end()
        assert batch is None or loader.state_dict() != before, "a batch that no step has seen is put back"

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(dp_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return batches


@pytest.fixture
def uneven_path(tmp_path):
    """In file order, stream 0 of 4 has far more text than the others."""
    return write_jsonl(tmp_path / "uneven.jsonl", ["x" * (1000 if i % 4 == 0 else 50 + i) for i in range(40)])


def test_without_epochs_all_ranks_end_at_the_last_full_batch(uneven_path):
    options = {"num_streams": 4, "shuffle": False}
    alone = run_ranks(uneven_path, 1, min, **options)
    spread = run_ranks(uneven_path, 4, min, **options)
    own = [sum(len(ByteTokenizer().encode("x" * (1000 if i % 4 == 0 else 50 + i), True, True)) for i in range(s, 40, 4))
           for s in range(4)]  # fmt: skip
    full = min((tokens - 1) // 32 // 2 for tokens in own)  # a batch of 8 takes two sequences of each stream
    assert {rank: len(batches) for rank, batches in spread.items()} == dict.fromkeys(range(4), full)
    assert len(alone[0]) == full
    assert not any((batch.labels == IGNORED).any() for batch in spread[0])


def test_validation_reads_everything_on_uneven_ranks_and_ends_together(uneven_path):
    options = {"num_streams": 4, "shuffle": False, "block_causal": True}
    spread, alone = run_ranks(uneven_path, 4, max, **options), run_ranks(uneven_path, 1, max, **options)
    assert len({len(batches) for batches in spread.values()}) == 1

    def num_labels(batches):
        return sum(int((batch.labels != IGNORED).sum()) for batch in batches)

    assert sum(map(num_labels, spread.values())) == num_labels(alone[0])
    last = spread[3][-1]
    assert (last.labels == IGNORED).all() and (last.inputs == EOS).all() and "padding" in last.origin.describe()


def test_a_reset_loader_gives_the_same_batches_again(path):
    loader = small_loader(path, any_says_so=bool)
    first = take(loader)
    assert loader.next() is None
    loader.reset()
    assert len(first) > 5 and equal(take(loader, 3), first[:3])
    loader.reset()
    assert equal(take(loader), first)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.7, 0.3], [8.0, 1.0]])
def test_sources_are_mixed_by_their_share_of_tokens(tmp_path, weights):
    paths = [write_jsonl(tmp_path / f"{c}.jsonl", [c * (20 + 60 * k + i % 9) for i in range(60)])
             for k, c in enumerate("ab")]  # fmt: skip
    loader = small_loader(*paths, weights=weights, epochs=-1)
    before = loader.state_dict()["streams"]
    take(loader, 150)
    for number, state in loader.state_dict()["streams"].items():
        counted = [
            after - at_start for after, at_start in zip(state["num_tokens"], before[number]["num_tokens"], strict=True)
        ]
        assert abs(counted[0] - sum(counted) * weights[0] / sum(weights)) <= 1000, (
            "some long documents, whatever the time"
        )
    batches = take(loader, 150)
    tokens = Counter(torch.cat([batch[:, :-1] for batch in batches]).flatten().tolist())
    shares = {c: tokens[ord(c)] * length for c, length in (("a", (24 + 2) / 24), ("b", (84 + 2) / 84))}
    assert abs(shares["a"] / sum(shares.values()) - weights[0] / sum(weights)) < 0.01


def test_a_source_of_long_documents_is_spread_over_the_batches(tmp_path):
    short = write_jsonl(tmp_path / "short.jsonl", ["s" * 30] * 64)
    long = write_jsonl(tmp_path / "long.jsonl", ["L" * 3200] * 64)
    loader = small_loader(short, long, weights=[0.75, 0.25], global_batch_size=64, epochs=-1)
    # 100 batches are as long as one long document; all streams begin at the start of one, so fewer than due at first.
    shares = [float((batch == ord("L")).float().mean()) for batch in take(loader, 700)]
    assert all(abs(share - 0.25) < 0.05 for share in shares[100:])
    assert all(share < 0.3 for share in shares[:100])


def test_a_mix_ends_where_a_source_that_is_due_has_ended(tmp_path):
    paths = [write_jsonl(tmp_path / "few.jsonl", ["a" * 98] * 4), write_jsonl(tmp_path / "many.jsonl", ["b" * 98] * 90)]
    loader = small_loader(*paths, num_streams=1, global_batch_size=1, shuffle=False)
    text = torch.cat([batch[0, :-1] for batch in take(loader)])
    assert int((text == ord("b")).sum()) <= 4 * 98


def test_a_batch_says_where_it_came_from(path):
    loader = small_loader(path, shuffle=False, num_streams=2, global_batch_size=2, epochs=-1)
    lines = loader.next().origin.describe().splitlines()
    assert lines[0] == f"slot 0: {path}:1 (epoch 1) to {path}:3 (epoch 1)"
    assert lines[1] == f"slot 1: {path}:2 (epoch 1)"
    while "(epoch 2)" not in loader.next().origin.describe():
        pass


def test_an_error_of_the_background_thread_reaches_the_caller(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n{"text": broken}\n')
    loader = small_loader(str(path), num_streams=1, global_batch_size=1, seq_len=8)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"bad\.jsonl:2: not JSON"):
            while True:
                assert loader.next() is not None


def test_close_and_forgetting_a_loader_end_its_thread(path):
    earlier = set(threading.enumerate())

    def own_threads():
        return [thread for thread in threading.enumerate() if thread not in earlier]

    loader = small_loader(path, epochs=-1)
    expected = take(loader, 4)
    assert len(own_threads()) == 1 and own_threads()[0].daemon
    loader.close()
    assert not own_threads()
    again = small_loader(path, epochs=-1)
    first = take(again, 2)
    again.close()
    assert equal(first + take(again, 2), expected), "a closed loader goes on after the last batch it returned"
    (thread,) = own_threads()
    del again
    thread.join(20)
    assert not own_threads()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_loader_neither_keeps_its_process_alive_nor_aborts_it(tmp_path, path, kind):
    import pyarrow
    import pyarrow.parquet

    if kind == "parquet":
        path = str(tmp_path / "train.parquet")
        pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 1000] * 5000}), path)
    program = f"import small_corpus; loader = small_corpus.small_loader({path!r}, epochs=-1); assert loader.next()"
    folders = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[3])])
    environment = {**os.environ, "PYTHONPATH": folders}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=30, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_fewer_documents_than_streams_are_refused(tmp_path):
    path = write_jsonl(tmp_path / "few.jsonl", ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"few\.jsonl has 3 documents, fewer than the 8 streams.*fewer streams"):
        small_loader(path)


def test_few_documents_a_stream_are_told_before_and_what_was_read_after(path, caplog):
    caplog.set_level(logging.INFO, "torchtitan")
    loader = small_loader(path, num_streams=64, global_batch_size=64)
    assert "has 200 documents for 64 streams, 3.1 each. The run ends with its shortest" in caplog.text
    num_labels = sum(batch[:, 1:].numel() for batch in take(loader))
    loader.end()
    share = num_labels / sum(len(text) + 2 for text in make_texts(200))
    read, in_part = map(
        int, re.search(r"streams read (\d+) of 200 documents .* to the end and (\d+) in part", caplog.text).groups()
    )
    assert 60 <= in_part <= 64 and read / 200 < share < (read + in_part) / 200 < 0.6
    caplog.clear()
    for options in ({"epochs": 20}, {"epochs": -1}, {"epochs": 1, "any_says_so": bool}):
        take(small_loader(path, num_streams=64, global_batch_size=64, **options), 5)
    assert "run ends with" not in caplog.text and "has ended" not in caplog.text


def test_shards_that_streams_have_to_share_are_logged(sharded_path, caplog):
    caplog.set_level(logging.INFO, "torchtitan")
    small_loader(sharded_path, num_streams=2)
    assert not caplog.records
    small_loader(sharded_path, num_streams=8)
    assert "has 3 shards for 8 streams, so up to 3 streams read each shard" in caplog.text


def test_a_stream_without_a_document_in_its_shards_is_an_error_and_no_endless_search(tmp_path):
    with gzip.open(tmp_path / "few.jsonl.gz", "wt") as file:
        file.write('{"text": "a"}\n' * 3)
    fresh = small_loader(str(tmp_path / "few.jsonl.gz"), num_streams=4, epochs=-1)
    resumed = small_loader(str(tmp_path / "few.jsonl.gz"), num_streams=4, dp_rank=3, dp_size=4)
    resumed.load_state_dict(fresh.state_dict())
    for loader in (fresh, resumed):
        with pytest.raises(ValueError, match=r"stream 3 of 4 found no document in 1 shards; set .*num_streams lower"):
            take(loader)
    (tmp_path / "few.jsonl").write_text('{"text": "a"}\n' * 3)
    options = {"num_streams": 4, "any_says_so": bool, "shuffle": False}  # validation: such a stream is padding
    batches = [take(small_loader(str(tmp_path / name), **options)) for name in ("few.jsonl", "few.jsonl.gz")]
    assert len(batches[0]) == 1 and equal(*batches)


def test_states_of_other_data_or_layouts_are_refused(path, tmp_path):
    loader = small_loader(path, num_streams=4)
    state = loader.state_dict()
    with pytest.raises(ValueError, match="4 streams, this run has 8; set training.num_streams = 4"):
        small_loader(path, num_streams=8).load_state_dict(state)
    with pytest.raises(ValueError, match="training.shuffle = True, this run has False; set training.shuffle = true"):
        small_loader(path, num_streams=4, shuffle=False).load_state_dict(state)
    other = write_jsonl(tmp_path / "other.jsonl", make_texts(100))
    with pytest.raises(ValueError, match=r"other\.jsonl has 100 documents in .* state was written for 200 documents"):
        small_loader(other, num_streams=4).load_state_dict(state)
    changed = write_jsonl(tmp_path / "changed.jsonl", make_texts(200, "another"))
    with pytest.raises(ValueError, match=r"changed\.jsonl has 200 documents in .* resume with the same data"):
        small_loader(changed, num_streams=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"has 1 sources, this run has 2: .*train\.jsonl, .*changed\.jsonl"):
        small_loader(path, changed, num_streams=4).load_state_dict(state)
    with pytest.raises(ValueError, match="another tokenizer, or .*; set model.hf_assets_path"):
        small_loader(path, num_streams=4).load_state_dict({**state, "tokenizer_sha256": "0"})
    rank = small_loader(path, num_streams=4, dp_rank=0, dp_size=2)
    with pytest.raises(ValueError, match=r"lacks streams 2, 3;"):
        small_loader(path, num_streams=4, dp_rank=1, dp_size=2).load_state_dict(rank.state_dict())
