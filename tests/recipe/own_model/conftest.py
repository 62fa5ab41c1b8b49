"""Trains a spec that a test writes down."""

import itertools

import pytest
from torch.nn import functional as F

from tests.recipe.own_model import any_models
from tests.tiny_runs import tiny_config, train_here
from torchtitan.models.spec import ModelSpec
from torchtitan.parallel.collectives import stop_process_group

numbers = itertools.count()


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains two steps of a spec, whose fields it is called with beside keys of the configuration."""

    def run(folder="run", *, steps=2, name=None, **said):
        keys = {key: value for key, value in said.items() if "__" in key}
        spec = {"build": any_models.mlp, "data": any_models.classes, "loss": F.cross_entropy}
        spec |= {key: value for key, value in said.items() if key not in keys}
        name = name or f"SPEC_{next(numbers)}"  # a name is looked up once
        monkeypatch.setattr(any_models, name, ModelSpec(**spec), raising=False)
        keys = {"training__epochs": -1, "training__steps": steps} | keys
        try:
            return train_here(
                tiny_config(tmp_path / folder, model__name=f"tests.recipe.own_model.any_models:{name}", **keys)
            )
        finally:
            stop_process_group()

    return run
