"""Experts of a batch on their way to a trainer; plugins/embedded/tests/trainer/test_routing.py has the trainer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import orjson
import pytest
from slime_testing_contracts.tiny import tiny_moe_model

from slime_core.errors import TrainError
from slime_core.learning.learner import routing_arrays
from slime_core.models.family import RoutedLayers, routed_layers
from slime_core.sample import TrainBatch
from slime_core.sample.routed_experts import FREE, RoutedExperts, json_default
from tests.batches import train_batch


@pytest.fixture(scope="module")
def model() -> RoutedLayers:
    return routed_layers(tiny_moe_model(), None)


def batch(*rows: object) -> TrainBatch:
    """One sample of four tokens per row."""
    tokens = [[1, 2, 3, 4]] * len(rows)
    return train_batch([[1, 1]] * len(rows), rollout_id=2, tokens=tokens, routed_experts=list(rows))


GIVEN = np.array([[[0, 3], [0, 0], [5, 1]], [[2, 2], [0, 0], [7, 6]], [[FREE, FREE], [0, 0], [1, 0]]], np.int32)
KEPT = GIVEN.copy()
KEPT[:, 1] = FREE  # a dense layer
KEPT[1, 0] = FREE  # twice the same expert is none


def test_rows_in_every_form(model: RoutedLayers) -> None:
    stored = orjson.loads(orjson.dumps(RoutedExperts.of(GIVEN), default=json_default))  # from another process
    found = routing_arrays(batch(GIVEN, GIVEN.tolist(), RoutedExperts.of(GIVEN), stored, None), model)
    for array in found[:4]:
        np.testing.assert_array_equal(array, KEPT)
        assert array.dtype == np.int32
    assert (found[4] == FREE).all()
    assert found[0] is not GIVEN, "the trainer fills them in"


def test_a_batch_without_the_column_gets_empty_ones(model: RoutedLayers) -> None:
    found = routing_arrays(replace(batch(None, None), routed_experts=None), model)
    assert [array.shape for array in found] == [(3, 3, 2)] * 2
    assert all((array == FREE).all() for array in found)


@pytest.mark.parametrize("wrong", [GIVEN[:2], GIVEN[:, :2], GIVEN[:, :, :1], np.where(GIVEN == 7, 8, GIVEN)])
def test_another_models_experts_are_named(model: RoutedLayers, wrong: np.ndarray) -> None:
    with pytest.raises(TrainError, match=r"sample 1 of rollout 3: .*3 layers and 2 of 8 experts per token"):
        routing_arrays(batch(None, wrong), model)
