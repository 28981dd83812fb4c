"""What travels to a worker process and back."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from slime_rewards.processes.messages import apply, changes, pack_args, restore, sample_state, unpack_args

from slime_core.config.schema import Args
from slime_core.sample import Sample
from slime_core.sample.provenance import Source, Span


def full_sample() -> Sample:
    sample = Sample(
        index=3, group_index=1, prompt=[{"role": "user", "content": "?"}], tokens=[1, 2, 3], response="ab",
        response_length=2, label={"answer": 4}, loss_mask=[1, 1], rollout_log_probs=[-0.5, -0.25],
        status=Sample.Status.TRUNCATED, metadata={"rows": np.arange(3), "nested": {"a": [1]}},
        spans=[Span(Source.USER, 1), Span(Source.SAMPLED, 2, "a reason")],
    )  # fmt: skip
    sample.spec_info.spec_verify_ct = 2
    sample.of_mine = "kept"
    return sample


def travelled(sample: Sample) -> tuple[Sample, dict]:
    data = pickle.dumps(sample_state(sample))
    return restore(pickle.loads(data)), pickle.loads(data)


def test_a_sample_arrives_whole() -> None:
    sample = full_sample()
    there, _ = travelled(sample)
    assert list(there.metadata.pop("rows")) == list(sample.metadata.pop("rows"))
    assert there == sample
    assert there.of_mine == "kept"
    assert [type(span.source) for span in there.spans] == [Source, Source]
    assert there.status is Sample.Status.TRUNCATED


def test_exactly_what_changed_comes_back() -> None:
    sample = full_sample()
    there, before = travelled(sample)
    there.metadata["nested"]["a"].append(math.nan)
    there.teacher_log_probs = [-1.0, -2.0]
    there.status = Sample.Status.COMPLETED
    there.spec_info.spec_verify_ct = 9
    there.loss_mask[0] = True  # equal to 1, but not the same
    there.new_attribute = 5
    there.label = None  # as an empty sample has it
    changed = changes(before, there)
    expected = {"metadata", "teacher_log_probs", "status", "spec_info", "loss_mask", "new_attribute", "label"}
    assert set(changed) == expected
    apply(sample, pickle.loads(pickle.dumps(changed)))
    assert sample.status is Sample.Status.COMPLETED
    assert sample.spec_info == Sample.SpecInfo(spec_verify_ct=9)
    assert sample.teacher_log_probs == [-1.0, -2.0]
    assert sample.loss_mask[0] is True
    assert math.isnan(sample.metadata["nested"]["a"][1])
    assert (sample.new_attribute, sample.label) == (5, None)


def test_settings_arrive_with_custom_ones_and_objects() -> None:
    args = Args.model_validate({"rm_type": "exact", "reward_key": "acc"})
    args.token_price, args.shape = 0.5, np.arange(2)
    there = unpack_args(pack_args(args))
    assert (there.rm_type, there.reward_key, there.token_price) == ("exact", "acc", 0.5)
    assert there.shape.tolist() == [0, 1]
    assert there.rm_timeout == args.rm_timeout == 300.0
    assert getattr(there, "absent", 7) == 7
    assert vars(there)["token_price"] == 0.5


def test_what_cannot_travel_says_so_when_it_is_read() -> None:
    there = unpack_args(pack_args(Args(a=1, handle=lambda: None)))
    assert there.a == 1
    with pytest.raises(AttributeError, match=r"args.handle cannot be sent .*execution='thread'"):
        _ = there.handle
