"""A site: an ordinary run that sends what it learned, a fragment at a time, and takes what all sites have learned.

Each rank exchanges the rows that it holds, in threads beside training. What was learned while a fragment travelled
stays; so nothing is lost by a late answer, and only a site that waits for all (quorum = sites) ever stands still.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from titan_fleet.section import swarm_of
from titan_fleet.swarm.decide import older_copy
from titan_fleet.swarm.drawing import Trip, draw
from titan_fleet.swarm.held import Held
from titan_fleet.swarm.identity import download, shared
from titan_fleet.swarm.link import Ended, Links, Travel
from torchtitan.config.schema import Config
from torchtitan.observe.log import logger
from torchtitan.observe.metrics import JsonLines, TensorBoard
from torchtitan.parallel.collectives import any_says_so, from_rank_0
from torchtitan.parallel.parts import ModelParts
from torchtitan.refusal import Refusal
from torchtitan.training.others import NoOthers
from torchtitan.training.run import Run

BEAT_SECONDS = 5.0
LAST_SECONDS = 5.0  # added to the grace after the last step, for the way
WARM_STEPS = 20  # after a late start, for the optimizer's empty moments


class Site(NoOthers):
    def __init__(self, config: Config, run: Run) -> None:
        section = self.section = swarm_of(config)
        assert section.site is not None and section.keys is not None
        self.run, self.links = run, Links(section.addresses, Path(section.keys), run.place.rank)
        said = {"site": section.site, "shared": shared(config), "streams": run.batch.num_streams}
        told = self._from_rank_0(lambda: self.links.hello(said))
        self.links.take_runs(told["runs"])
        self.seed, self.part = told["seed"], (told["part"], told["parts"])
        if config.debug.seed not in (None, self.seed):
            raise Refusal(f"debug.seed = {config.debug.seed}, but the swarm has {self.seed}; leave it out here")
        self.waits_for_all = section.quorum >= section.sites
        self.versions = [-1] * section.fragments
        self.counted_to = [0] * section.fragments  # the step of the last difference that counted
        self.travels: dict[int, Travel] = {}
        self.flying: dict[int, int] = {}  # of a checkpoint: fragments that were on their way, and since which step
        self.trips: list[Trip] = []
        self._started = time.monotonic()
        self.records: JsonLines | None = None
        self.curves: TensorBoard | None = None
        self.is_new, self.joined_at, self.speed, self._pace, self.step = True, 0, 0.0, 0.0, 0
        if run.place.rank == 0:
            logger.info(
                f"swarm {self.links.run} at {self.links.urls}: part {self.part[0] + 1} of {self.part[1]} of the data"
            )

    def warming(self, factor: Callable[[int], float]) -> Callable[[int], float]:
        def warmed(step: int) -> float:
            since = step - self.joined_at
            return factor(step) * (min(1.0, since / WARM_STEPS) if self.joined_at and since >= 0 else 1.0)

        return warmed

    # --- checkpoints

    def attach(self, model: ModelParts) -> None:
        self.held = Held(model, self.run.mesh, self.section.fragments, self.section.codec)

    def tensors(self) -> dict[str, Tensor]:
        return self.held.tensors()

    def state(self) -> dict[str, Any]:
        flying = {str(number): travel.step for number, travel in self.travels.items()}
        return {
            "run": self.links.run,
            "versions": self.versions,
            "counted_to": self.counted_to,
            "flying": flying,
            "joined_at": self.joined_at,
        }

    def load(self, state: dict[str, Any]) -> None:
        if state["run"] != self.links.run:
            raise Refusal(
                f"the checkpoint is of swarm {state['run']}, and {self.links.all[0].url} serves {self.links.run}; name "
                "another job.dump_folder, or serve the folder of that swarm"
            )
        self.versions, self.counted_to = list(state["versions"]), list(state["counted_to"])
        self.flying = {int(number): step for number, step in state["flying"].items()}
        self.is_new, self.joined_at = False, state["joined_at"]
        self.held.fill_copies()

    # --- joining

    def begin(self, step: int) -> int:
        if self.is_new:
            self.held.begin()
        table = [[w.name, list(w.shape)] for w in self.held.weights]
        said: dict[str, Any] = {"weights": table, "step": step, "is_new": self.is_new}
        said["download"] = download(self.run, self.held.model, self.is_new)
        told = self._from_rank_0(lambda: self.links.join(said))
        self.links.take_sessions(told["sessions"])
        self.held.free_gathered()
        for number, version in enumerate(told["versions"]):
            own = self.versions[number]
            replays = self.waits_for_all and 0 <= own <= version
            if replays or (own == version and own >= 0):
                continue  # a site that waits for all lives through the merges that it knows again
            if version < 0:
                self._offer(number)
            elif own > version:
                raise Refusal(older_copy(number, own, version))
            self._take_newest(number)
            self.flying.pop(number, None)
        if told["begins_at"] > step:
            step = self.joined_at = told["begins_at"]
            self._log(
                f"this site joins late, so it begins at step {step}, where the run is, and its optimizer warms up"
            )
        if told["again"]:
            self._log(f"the documents of the last {told['again']} steps before this start are read again")
        self.counted_to = [max(counted, step) if self.is_new else counted for counted in self.counted_to]
        self.step, self.begun = step, step
        self._stepped = self._started = time.monotonic()
        self._clock = told["clock"] - self._stepped  # the syncer's: sites that meet by time meet together
        self._turn = self._turn_now()
        if self.run.place.rank == 0:
            threading.Thread(target=self._beat, daemon=True).start()
        for number, sent_at in sorted(self.flying.items()):
            self._depart(number, sent_at)
            if step >= sent_at + self.section.delay:  # the run was stopped while it waited for this one
                self._take(number, self.section.grace_seconds, lambda: False)
        self.flying = {}
        return step

    def _offer(self, number: int) -> None:
        sent, anchor = self.held.sent[number], self.held.anchor_bytes(number)
        _together(lambda: self.links.of(number).found(number, sent, anchor))

    def _take_newest(self, number: int) -> None:
        """The anchor as it is now, of one version on all ranks."""
        while True:
            version, payload = _together(lambda: self.links.of(number).fetch_anchor(number, self.held.boxes[number]))
            versions: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(versions, version)
            if len(set(versions)) == 1:
                self.held.take_anchor(number, payload)
                self.versions[number] = version
                return

    # --- meetings

    def meet(self, step: int, is_asked_to_stop: Callable[[], bool]) -> None:
        """Send the fragment whose turn it is, and take those that have arrived."""
        now = time.monotonic()
        self.step, self._stepped, passed = step, now, now - self._stepped
        # The time is averaged, not the speed: on a GPU most steps are only queued, and one waits for them.
        self._pace = passed if self._pace == 0 else 0.9 * self._pace + 0.1 * passed
        self.speed = self.run.tokens_per_step / max(self._pace, 1e-6)
        is_last, due, grace = step == self.run.config.training.steps, self._due(step), self.section.grace_seconds
        grace += LAST_SECONDS if is_last else 0
        for number in range(self.section.fragments):
            if is_last and number in self.travels:
                self._take(number, grace, is_asked_to_stop)
            if is_last or number in due:
                self._send(number, step)
        for number, travel in sorted(self.travels.items()):
            if is_last or step == travel.step + self.section.delay:
                self._take(number, grace, is_asked_to_stop)
            elif step > travel.step + self.section.delay:  # only look
                self._take(number, 0.0, is_asked_to_stop)

    def _send(self, number: int, step: int) -> None:
        if number in self.travels:
            since = self.travels[number].step
            self._log(f"fragment {number} is on its way since step {since}, so it is not sent again at step {step}")
            return
        self.held.free_gathered()
        self.held.note_sent(number)
        self._depart(number, step)

    def _due(self, step: int) -> list[int]:
        """Fragments meet in turn: by steps, the last one at every whole `every`; by time, as rank 0's clock says."""
        count, every = self.section.fragments, self.section.every
        if self.section.every_seconds is None:
            return [number for number in range(count) if (step - (number + 1) * every // count) % every == 0]
        before, self._turn = self._turn, self._turn_now()
        return [] if self._turn == before else [self._turn % count]

    def _turn_now(self) -> int:
        seconds = (self.section.every_seconds or self.section.every) / self.section.fragments
        return from_rank_0(int((time.monotonic() + self._clock) / seconds))

    def _depart(self, number: int, step: int) -> None:
        tokens = (step - self.counted_to[number]) * self.run.tokens_per_step
        boxes, sent = self.held.boxes[number], self.held.sent[number]
        travel = Travel(number, self.versions[number], step, tokens, boxes, sent, self.held.encoded(number))
        self.travels[number] = travel
        threading.Thread(target=self.links.of(number).carry, args=(travel,), daemon=True).start()

    def _take(self, number: int, patience: float, is_asked_to_stop: Callable[[], bool]) -> None:
        """Take what has arrived, after a wait of at most so many seconds, or of any length if all wait for all."""
        travel, begun = self.travels[number], time.monotonic()
        while any_says_so(not travel.has_arrived):
            is_over = not self.waits_for_all and (time.monotonic() - begun >= patience or self.links.of(number).is_away)
            if any_says_so(is_asked_to_stop() or is_over):
                return
            time.sleep(0.01 if time.monotonic() - begun < 1 else 0.1)
        waited = time.monotonic() - begun
        del self.travels[number]
        if travel.failed is not None and not isinstance(travel.failed, Ended):
            raise travel.failed
        assert travel.about is not None
        about, counts = travel.about, self.section.site in travel.about["counted"]
        self.held.free_gathered()
        self.held.keep_rest(number, counts)
        if about["updates"] and counts:
            self.held.take_updates(number, about["updates"], travel.payload, self.section.mix)
            self.versions[number] = about["version"]
            if (own := self.held.checksum(number)) != about["checksum"]:
                raise Refusal(
                    f"after meeting {about['version']} of fragment {number} this site's anchor has the checksum {own}, "
                    f"and the syncer's {about['checksum']}: memory or the link has changed it; start from a checkpoint"
                )
        else:  # the site was left out, or was away for too long
            self._take_newest(number)
        self.counted_to[number] = travel.step
        self._report(travel, about, waited, counts)

    def _report(self, travel: Travel, about: dict[str, Any], waited: float, counts: bool) -> None:
        count, hidden = len(about["counted"]), max(0.0, travel.seconds - waited)
        left_out = "" if counts else f", but not this site: {about['rejected'].get(self.section.site, (0, ''))[1]}"
        if self.run.place.rank:
            return
        numbers = {"participation": count / about["sites"], "outer_norm": about["norm"], "apart": about["apart"]}
        numbers |= {"bytes_up": travel.bytes_up, "bytes_down": travel.bytes_down}
        numbers |= {"seconds": travel.seconds, "waited_seconds": waited}
        exact = {"fragment": travel.number, "version": about["version"], "checksum": about["checksum"]}
        names = {"counted": list(about["counted"]), "rejected": list(about["rejected"])}
        try:
            if self.records is None:  # only now: the run folder is made after the site has joined
                self._open_records()
            assert self.records is not None
            self.records.write(self.step, exact | names | numbers)
            if self.curves is not None:
                self.curves.write(self.step, {f"swarm/{name}": number for name, number in numbers.items()})
        except OSError as error:  # as any record: a full disk must not end the training
            logger.warning(f"step {self.step}: the meeting could not be recorded: {error.strerror or error}")
        what = f"meeting {about['version']}, {count} of {about['sites']}, step {self.step}"
        begin, seconds = travel.begun - self._started, time.monotonic() - travel.begun
        self.trips.append(Trip(travel.number, begin, seconds, min(waited, seconds), what))
        self._log(
            f"meeting {about['version']} of fragment {travel.number}: {count} of {about['sites']}{left_out}, "
            f"{travel.bytes_up / 1e6:.2f} MB up, {travel.seconds:.1f} s, {hidden:.1f} s of it hidden, "
            f"sites {about['apart']:.2%} apart"
        )

    def close(self, step: int) -> None:
        """Leave the swarm, and what still travels."""
        if self.travels:
            numbers = ", ".join(map(str, sorted(self.travels)))
            self._log(
                f"at the end, fragment {numbers} had not arrived: what this site learned is in its own weights only"
            )
        self.links.ended.set()
        if self.run.place.rank == 0:
            self.links.tell("/leave", {})
            title, total = f"site {self.section.site}, to step {step}", time.monotonic() - self._started
            try:
                draw(self.run.folder / "swarm.svg", title, self.section.fragments, self.trips, total)
            except OSError as error:
                logger.warning(f"swarm.svg could not be written: {error.strerror or error}")
        self.links.close()
        for sink in (self.records, self.curves):
            if sink is not None:
                sink.close()

    # --- helpers

    def _open_records(self) -> None:
        metrics = self.run.config.metrics
        self.records = JsonLines(self.run.folder / "swarm.jsonl", self.begun)
        if metrics.enable_tensorboard:
            self.curves = TensorBoard(self.run.folder / metrics.save_tb_folder / "swarm", self.begun)

    def _beat(self) -> None:
        while not self.links.ended.wait(BEAT_SECONDS):
            self.links.tell("/beat", {"speed": self.speed, "step": self.step})

    def _from_rank_0(self, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        def asked() -> Any:
            try:
                return ask()
            except Refusal as refusal:  # told to all, and raised by all
                return refusal

        told: list[Any] = [_together(asked if self.run.place.rank == 0 else lambda: None)]
        dist.broadcast_object_list(told, src=0)
        if isinstance(told[0], Refusal):
            raise told[0]
        answer: dict[str, Any] = told[0]
        return answer

    def _log(self, text: str) -> None:
        if self.run.place.rank == 0:
            logger.info(text)


def _together(work: Callable[[], Any]) -> Any:
    """Do something on each rank while the ranks stay in touch: a syncer that is away is no rank that hangs."""
    done: list[Any] = []
    failed: list[BaseException] = []

    def doing() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=doing, daemon=True)
    thread.start()
    while any_says_so(thread.is_alive()):
        time.sleep(0.01)
    if failed:
        raise failed[0]
    return done[0]
