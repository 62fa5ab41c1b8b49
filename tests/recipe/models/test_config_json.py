"""What a downloaded config.json leaves out, against transformers' own configuration classes."""

from typing import Any

import pytest

from torchtitan.models.families import find_families
from torchtitan.refusal import Refusal

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 16, "vocab_size": 97}
NEEDED: dict[str, dict[str, Any]] = {  # keys without which a file is refused here, whatever transformers assumes
    "llama": SIZES | {"intermediate_size": 160},
    "qwen3": SIZES | {"intermediate_size": 160, "num_key_value_heads": 4, "head_dim": 16},
    "qwen3_moe": SIZES
    | {"moe_intermediate_size": 32, "num_key_value_heads": 4, "head_dim": 16}
    | {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "mixtral": SIZES | {"intermediate_size": 160, "num_local_experts": 8, "num_experts_per_tok": 2},
}
FILES = {files.model_type: files for spec in find_families().values() if (files := spec.hugging_face())}


def test_every_family_is_compared() -> None:
    assert FILES.keys() == NEEDED.keys()


@pytest.mark.parametrize("model_type", NEEDED)
def test_what_config_json_leaves_out_is_as_in_transformers(model_type: str) -> None:
    short = {"model_type": model_type} | NEEDED[model_type]
    theirs = pytest.importorskip("transformers").AutoConfig.for_model(**short)
    full = theirs.to_dict() | {"head_dim": getattr(theirs, "head_dim", None)}
    assert {"rms_norm_eps", "rope_parameters", "max_position_embeddings", "tie_word_embeddings"} <= full.keys()
    assert FILES[model_type].from_config(short) == FILES[model_type].from_config(full)


@pytest.mark.parametrize("model_type", NEEDED)
def test_a_key_that_is_needed_is_not_guessed(model_type: str) -> None:
    for key in NEEDED[model_type]:
        short = {name: value for name, value in NEEDED[model_type].items() if name != key}
        with pytest.raises(Refusal, match=f"no {key}|{key} = False, must be True"):
            FILES[model_type].from_config(short)


@pytest.mark.parametrize("model_type", NEEDED)
def test_dropout_of_attention_which_training_would_leave_out_is_refused(model_type: str) -> None:
    assert FILES[model_type].from_config(NEEDED[model_type] | {"attention_dropout": 0})
    with pytest.raises(Refusal, match=r"attention_dropout = 0.1, must be 0.0$"):
        FILES[model_type].from_config(NEEDED[model_type] | {"attention_dropout": 0.1})
