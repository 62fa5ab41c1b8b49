"""What all sites of a run must say alike."""

from typing import Any

from torchtitan.config.schema import Config

PROTOCOL = 2
_KEYS = (
    *(
        "swarm.every",
        "swarm.every_seconds",
        "swarm.fragments",
        "swarm.codec",
        "swarm.method",
        "swarm.outer_lr",
        "swarm.outer_momentum",
    ),
    *("model.name", "model.flavor", "training.seq_len", "training.dataset", "training.shuffle"),
    *("optimizer.name", "optimizer.lr"),
)


def shared(config: Config) -> dict[str, Any]:
    values = config.model_dump(mode="json")
    return {"protocol": PROTOCOL} | {key: values[key.partition(".")[0]][key.partition(".")[2]] for key in _KEYS}
