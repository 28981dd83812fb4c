"""What generate functions written for THUDM/slime do to samples: turns without tokens, images by address."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slime_data.saved import read_samples

from slime_core.data.dumps import write_samples
from slime_core.sample import Sample

ABORTED = {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "4"}


@pytest.mark.parametrize("more", [{}, {"log_probs": []}, {"log_probs": None}, {"log_probs": [], "text": ""}])
@pytest.mark.parametrize("begun", [False, True])
def test_a_turn_that_was_aborted_before_its_first_token_is_taken_in(more: dict[str, Any], begun: bool) -> None:
    sample = Sample(tokens=[1, 2])
    if begun:
        sample.append_response_tokens(None, tokens=[3], log_probs=[-0.5], meta_info={"weight_version": "3"}, text="a")
    held = list(sample.tokens), sample.response_length, sample.response
    sample.append_response_tokens(None, tokens=[], trainable=True, meta_info={**ABORTED, "cached_tokens": 2}, **more)
    assert (sample.tokens, sample.response_length, sample.response) == held
    assert sample.status.value == "aborted"
    assert sample.weight_versions == (["3", "4"] if begun else ["4"])
    assert sample.prefix_cache_info.cached_tokens == 2
    sample.append_response_tokens(None, tokens=[9], log_probs=[-1.0], meta_info={"finish_reason": {"type": "stop"}})
    assert sample.status.value == "completed"
    assert sample.loss_mask == [1] * sample.response_length


def test_an_empty_observation_and_an_empty_turn_after_a_response_made_by_hand_change_no_token() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2)
    sample.append_response_tokens(None, tokens=[], meta_info=ABORTED)
    sample.append_response_tokens(None, tokens=[], log_probs=[], trainable=False)
    assert (sample.rollout_log_probs, sample.token_weight_versions) == (None, [])
    sample.append_response_tokens(None, tokens=[4], trainable=False)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0], None)


def test_an_observation_may_come_with_zeros_for_log_probs() -> None:
    sample = Sample(tokens=[1])
    sample.append_response_tokens(None, tokens=[2], log_probs=[-0.5])
    sample.append_response_tokens(None, tokens=[3, 4], log_probs=[0.0, 0.0], trainable=False)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 0, 0], [-0.5, 0.0, 0.0])
    with pytest.raises(ValueError, match="no policy sampled"):
        sample.append_response_tokens(None, tokens=[5], log_probs=[0.0, 0.0], trainable=False)


def test_tokens_are_appended_to_a_response_made_by_hand_with_its_log_probs() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1, 0], rollout_log_probs=[-0.1, 0.0])
    sample.append_response_tokens(None, tokens=[4], log_probs=[-0.2], meta_info={"weight_version": "5"})
    assert sample.rollout_log_probs == [-0.1, 0.0, -0.2]
    assert sample.token_weight_versions == []  # those of the first tokens are not known
    assert sample.weight_versions == ["5"]


REMOTE = "https://example.org/cat.png"
MESSAGE = {
    "role": "user",
    "content": [{"type": "image_url", "image_url": {"url": REMOTE}}, {"type": "text", "text": "?"}],
}


@pytest.mark.parametrize("image", [REMOTE, {"url": REMOTE}, {"type": "image_url", "url": REMOTE}])
def test_an_image_by_its_address_is_stored_and_sent_and_no_server_is_asked_to_fetch_it(
    image: Any, tmp_path: Path
) -> None:
    sample = Sample(index=1, prompt=[MESSAGE], multimodal_inputs={"images": [image]})
    stored = json.loads(json.dumps(sample.to_dict()))
    assert stored["multimodal_inputs"] == {"images": [REMOTE]}
    assert Sample.from_dict(stored).prompt == [MESSAGE]
    assert pickle.loads(pickle.dumps(sample)) == sample
    write_samples(tmp_path / "dump.json", [sample])
    assert read_samples(tmp_path / "dump.json")[0].multimodal_inputs == {"images": [REMOTE]}
    with pytest.raises(ValueError, match="not fetched from the web; save it"):
        sample.image_data()


def test_counters_of_speculation_and_tokens_kept_as_tensors() -> None:
    sample, counted = Sample(), {"finish_reason": {"type": "stop"}, "spec_accept_token_num": 7}
    for algorithm in (None, "EAGLE"):
        args = SimpleNamespace(sglang_speculative_algorithm=algorithm)
        sample.append_response_tokens(args, tokens=[], trainable=True, meta_info=counted)
        assert sample.spec_info.spec_accept_token_num == (7 if algorithm else 0)
    sample.spec_info.add(meta_info={"spec_accept_token_num": 1})
    assert sample.spec_info.spec_accept_token_num == 8
    sample = Sample(tokens=[5, 6, 7], response_length=2, loss_mask=[1, 1], rollout_log_probs=[-1.0, -1.0])
    sample.rollout_top_p_token_ids = torch.tensor([1, 2, 3], dtype=torch.int32)  # type: ignore[assignment]
    sample.rollout_top_p_token_offsets = torch.tensor([0, 1, 3], dtype=torch.int32)  # type: ignore[assignment]
    sample.append_response_tokens(tokens=[8], trainable=False)
    assert (sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets) == ([1, 2, 3], [0, 1, 3, 3])
    assert Sample().apply_chat_template_kwargs == {}


@pytest.mark.parametrize("given", [("p",), (0, [1]), (0, 1, "p", [1, 2])])
def test_fields_given_in_another_order_are_told(given: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"expected a number\. Name the fields: Sample\(group_index=0"):
        Sample(*given)
