"""What the training loop and the thread of its watch tell each other when a run may have to end."""

from threading import Event

from torchtitan.observe.peers.hang import Whereabouts

Progress = tuple[int, ...]


class Verdict:
    """Why all ranks end. A verdict stands while nothing has progressed since: otherwise it was about a pause."""

    def __init__(self) -> None:
        self._wake, self._answered, self._left = Event(), Event(), Event()
        self.thrown: tuple[Whereabouts, BaseException] | None = None  # place and error of a failed collective
        self.follows = False  # another rank ended first
        self.last_words = ""  # why this rank ends, for the other ranks
        self._message, self._stood = "", Progress()

    def standing(self, now: Progress) -> str:
        """The verdict, or "" if there was progress since."""
        return self._message if self._stood == now else ""

    # The loop's thread calls these.

    def ask(self, where: Whereabouts, error: BaseException, now: Progress, seconds: float) -> None:
        """A collective failed: wait for the verdict."""
        if self._message and not self.standing(now):
            self._answered.clear()
        self.thrown = where, error
        self._wake.set()
        self._answered.wait(seconds)

    def leave(self, last_words: str) -> None:
        self.last_words = last_words
        self._left.set()
        self._wake.set()

    def look_again(self) -> None:
        """The thread looks at once: asleep as long as before, it would see a short pause too late."""
        self._wake.set()

    # The watch's thread calls these.

    def sleep(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def has_left(self, seconds: float | None = 0) -> bool:
        """Whether the loop has ended; waits for that so long, or as long as it takes."""
        return self._left.wait(seconds)

    def give(self, message: str, now: Progress, follows: bool = False) -> None:
        self._message, self._stood, self.follows = message, now, follows
        self._answered.set()

    def give_none(self) -> None:
        """There will be no verdict: the loop need not wait for one."""
        self._answered.set()
