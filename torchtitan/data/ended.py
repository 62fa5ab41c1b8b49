"""Says how much of the data was read once a run has come to its end."""

from collections.abc import Sequence
from typing import Any

from torchtitan.data.cursor import Source
from torchtitan.data.stream import due_source
from torchtitan.data.texts.documents import Documents
from torchtitan.observe.log import logger


def log_end(sources: Sequence[Source], states: dict[str, dict[str, Any]], num_streams: int) -> None:
    """Log how much of the data was read when the shortest stream ended. Rank 0 logs this for its own streams."""
    weights = [source.weight for source in sources]
    for number, source in enumerate(sources):
        if not isinstance(source.data, Documents) or source.epochs < 0:
            continue  # the length of such a stream is not known
        total = read = in_part = 0
        for stream, state in states.items():
            length = len(range(int(stream), len(source.data), num_streams))
            epoch, position = state["cursors"][number]
            total += length * source.epochs
            read += length * epoch + position
            in_part += state["offset"] > 0 and due_source(state["num_tokens"], weights) == number
        logger.info(
            f"the data has ended: {len(states)} streams read {read:,} of {total:,} documents of {source.name} "
            f"({read / total:.0%}) to the end and {in_part:,} in part"
        )
