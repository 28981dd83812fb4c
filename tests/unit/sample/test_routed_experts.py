from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core.config import Args
from slime_core.sample import Sample
from slime_core.sample.routed_experts import FREE, RoutedExperts

LAYERS, TOP_K = 3, 2


def numbers(rows: int, first: int = 0) -> np.ndarray:
    """Every number different, so that a row in the wrong place shows."""
    count = rows * LAYERS * TOP_K
    return (first + np.arange(count, dtype=np.int32)).reshape(rows, LAYERS, TOP_K)


def as_sglang(array: np.ndarray) -> str:
    return base64.b64encode(array.astype("<i4").tobytes()).decode()


def checkpoint(path: Path) -> Args:
    (path / "config.json").write_text(json.dumps({"num_hidden_layers": LAYERS}))
    return Args(hf_checkpoint=str(path))


@pytest.mark.parametrize("form", [np.asarray, np.ndarray.tolist, lambda a: a.astype(np.int16)])
def test_it_reads_arrays_and_lists_and_numpy_reads_it(form: Any) -> None:
    given = numbers(4)
    found = RoutedExperts.of(form(given))
    assert found.shape == (4, LAYERS, TOP_K)
    assert np.asarray(found).dtype == np.int32
    np.testing.assert_array_equal(np.asarray(found), given)
    assert found[1] == given[1].tolist()
    assert found[-1] == given[-1].tolist()
    assert RoutedExperts.of(json.loads(json.dumps(found.to_json()))) == found


def test_base64_of_sglang_fills_the_tokens(tmp_path: Path) -> None:
    sample = Sample(tokens=[5, 6, 7])
    meta = {"finish_reason": {"type": "stop"}, "routed_experts": as_sglang(numbers(4))}
    sample.append_response_tokens(checkpoint(tmp_path), [8, 9], [-0.1, -0.2], meta_info=meta)
    np.testing.assert_array_equal(np.asarray(sample.rollout_routed_experts), numbers(4))


def test_base64_that_does_not_fill_the_tokens_changes_nothing(tmp_path: Path) -> None:
    sample = Sample(tokens=[5, 6, 7])
    meta = {"routed_experts": as_sglang(numbers(4).ravel()[:-1])}
    with pytest.raises(ValueError, match="not 4 tokens x 3 layers"):
        sample.append_response_tokens(checkpoint(tmp_path), [8, 9], [-0.1, -0.2], meta_info=meta)
    assert (sample.tokens, sample.response_length, sample.rollout_routed_experts) == ([5, 6, 7], 0, None)


def test_turns_keep_what_they_know_and_fill_what_they_do_not() -> None:
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(None, [3, 4], [-1.0, -1.0], meta_info={"routed_experts": numbers(3)})
    sample.append_response_tokens(None, [5, 6], trainable=False)
    # Token 4 was sampled but not yet fed, tokens 5 and 6 were never fed: nobody knows their experts.
    assert np.asarray(sample.rollout_routed_experts)[:, 0, 0].tolist() == [0, 6, 12, FREE, FREE]
    second = numbers(6, first=100)
    sample.append_response_tokens(None, [7], [-1.0], meta_info={"routed_experts": second})
    found = np.asarray(sample.rollout_routed_experts)
    np.testing.assert_array_equal(found[:3], numbers(3))
    np.testing.assert_array_equal(found[3:], second[3:])
    sample.validate()


def test_rows_that_do_not_fit_the_tokens_are_refused() -> None:
    sample = Sample(tokens=[1, 2])
    with pytest.raises(ValueError, match="5 rows from token 0 on; 3 tokens need 2"):
        sample.append_response_tokens(None, [3], [-1.0], meta_info={"routed_experts": numbers(5)})
    sample.rollout_routed_experts = numbers(4)
    with pytest.raises(ValueError, match="4 rows for 2 tokens"):
        sample.validate()


def test_samples_are_stored_with_their_experts() -> None:
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(None, [3], [-1.0], meta_info={"routed_experts": numbers(2)})
    stored = json.loads(json.dumps(sample.to_dict()))
    assert Sample.from_dict(stored) == sample
    assert copy.deepcopy(sample) == sample
    sample.reset_for_retry()
    assert sample.rollout_routed_experts is None
