"""What sites must say alike, and what is their own."""

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_runs import tiny_config
from titan_fleet.section import swarm_of
from titan_fleet.swarm.identity import TOTAL_STEPS, shared
from titan_fleet.swarm.messages import Hello, read
from titan_fleet.swarm.syncer.syncer import Syncer
from torchtitan.config.schema import Config
from torchtitan.refusal import Refusal

LLAMA = {"model__name": "llama3", "model__flavor": "debugmodel", "model__n_kv_heads": 8}
OWN = {"model__name": "tests.tiny_models:LLAMA"}
OTHERWISE = [  # model, the key and its other value, what the refusal says
    (LLAMA, "model.n_heads", 8, "model.n_heads is 8 at this site and 16 in the run"),
    (LLAMA, "model.n_kv_heads", 4, "model.n_kv_heads is 4 at this site and 8 in the run"),
    (LLAMA, "model.rope_theta", 1e4, "model.rope_theta is 10000.0 at this site and 500000.0 in the run"),
    (LLAMA, "model.rope_scaling", {"factor": 2.0}, 'model.rope_scaling is \'{"factor": 2.0, '),
    (LLAMA, "model.norm_eps", 1e-6, "model.norm_eps is 1e-06 at this site and 1e-05 in the run"),
    (OWN, "model.rope_theta", 1e4, "model.rope_theta is 10000.0 at this site and None in the run"),
    (OWN, "model.attn_mask_type", "block_causal", "model.attn_mask_type is 'block_causal' at this site"),
    (OWN, "training.steps", 14, f"{TOTAL_STEPS} is 14 at this site and 10 in the run"),
    (OWN, "training.max_norm", float("inf"), "training.max_norm is 'inf' at this site and 1.0 in the run"),
    (OWN, "lr_scheduler.min_lr_factor", 0.5, "lr_scheduler.min_lr_factor is 0.5 at this site and 0.0 in the run"),
    (OWN, "lr_scheduler.decay_type", "cosine", "lr_scheduler.decay_type is 'cosine' at this site"),
    (OWN, "optimizer.weight_decay", 0.0, "optimizer.weight_decay is 0.0 at this site and 0.1 in the run"),
    (OWN, "optimizer.beta2", 0.99, "optimizer.beta2 is 0.99 at this site and 0.95 in the run"),
    (OWN, "swarm.quorum", 1, "swarm.quorum is 1 at this site and 2 in the run"),
    (OWN, "swarm.sites", 2, "swarm.sites is 2 at this site and 8 in the run"),
]


def hello(syncer: Syncer, config: Config) -> None:
    said = {"site": "lima", "shared": shared(config), "streams": 8, "place": (0, 1), "swarm": ""}
    heard = read(Hello, Hello.model_validate(said).model_dump_json())
    syncer.hello(heard.site, heard.shared, heard.streams)


def serving(folder: Path, **keys: Any) -> Syncer:
    config = tiny_config(folder, **keys)
    return Syncer(folder / "syncer", swarm_of(config), shared(config), 0)


@pytest.mark.parametrize(("model", "key", "value", "says"), OTHERWISE)
def test_a_site_that_would_train_otherwise_is_refused_by_the_key(tmp_path, model, key, value, says):
    changed = model | {key.replace(".", "__"): value}
    with pytest.raises(Refusal) as refused:
        hello(serving(tmp_path, **model), tiny_config(tmp_path, **changed))
    assert says in str(refused.value) and str(refused.value).count(" at this site and ") == 1


def test_how_a_site_computes_is_its_own(tmp_path):
    others = {"training__local_batch_size": 2, "optimizer__implementation": "foreach", "training__steps": 5}
    others |= {"optimizer__average_decay": 0.99, "training__dtype": "bfloat16", "lr_scheduler__total_steps": 10}
    hello(serving(tmp_path), tiny_config(tmp_path, **others))


def test_a_syncer_may_start_again_with_a_lower_quorum_and_more_steps_but_no_other_model(tmp_path):
    serving(tmp_path, **LLAMA)
    later = LLAMA | {"swarm__quorum": 1, "training__steps": 20}
    hello(serving(tmp_path, **later), tiny_config(tmp_path, **later))
    with pytest.raises(Refusal, match=r"holds another swarm's run: model.n_heads is 8 in this file and 16 in the run"):
        serving(tmp_path, **later, model__n_heads=8)
