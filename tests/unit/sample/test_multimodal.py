from __future__ import annotations

import base64
import copy
import json
import pickle
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from slime_data.images import open_image
from slime_data.saved import read_samples
from slime_testing_contracts.tiny_vision import write_image

from slime_core.data.dumps import write_samples
from slime_core.errors import RolloutError
from slime_core.multimodal import TrainInputs, image_bytes, image_ref, image_url
from slime_core.sample import Sample, SampleStatus
from slime_core.sample.columns import multimodal_column


def finished(index: int, image: Path | None = None) -> Sample:
    sample = Sample(index=index, group_index=0, prompt="q", tokens=[5, 6], reward=1.0, rollout_id=index)
    if image is not None:
        sample.multimodal_inputs = {"images": [str(image)]}
        pixels = np.random.default_rng(index).standard_normal((1, 3, 2, 2)).astype(np.float32)
        sample.multimodal_train_inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2]])}
    sample.append_response_tokens(tokens=[7, 8], log_probs=[-0.5, -0.25], meta_info={"weight_version": "1"})
    sample.status = SampleStatus.COMPLETED
    return sample


# -- images ----------------------------------------------------------------------------------------------


def test_every_form_of_an_image_is_the_same_image(tmp_path: Path) -> None:
    path = write_image(tmp_path / "a.png", 1)
    data = path.read_bytes()
    forms = [path, "a.png", data, base64.b64encode(data).decode(), {"bytes": data, "path": None}, {"url": str(path)}]
    refs = [image_ref(form, tmp_path) for form in forms]
    assert all(image_bytes(ref) == data for ref in refs)
    assert refs[0] == refs[1] == str(path)
    assert {image_url(ref) for ref in refs} == {"data:image/png;base64," + base64.b64encode(data).decode()}
    pixels = np.asarray(open_image(refs[0]))
    assert np.array_equal(pixels, np.asarray(open_image(image_ref(open_image(refs[2])))))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("https://example.org/a.png", "not fetched from the web"),
        ("nowhere.png", "neither an image file nor base64"),
        (b"GARBAGE", "no PNG, JPEG"),
        (7, "not int"),
        ({"caption": "x"}, "needs 'bytes' or 'path'"),
    ],
)
def test_what_is_no_image_is_named(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image_ref(value)


# -- train inputs ----------------------------------------------------------------------------------------


def test_train_inputs_come_back_bit_for_bit() -> None:
    pixels = np.random.default_rng(0).standard_normal((4, 7)).astype(np.float32)
    inputs = TrainInputs.of(
        {"pixel_values": torch.tensor(pixels), "grid": [[1, 2, 2]], "half": torch.ones(2).bfloat16()}
    )
    again = TrainInputs.of(json.loads(json.dumps(inputs.to_json())))
    assert again == inputs == pickle.loads(pickle.dumps(inputs))
    assert np.array_equal(again["pixel_values"], pixels)
    assert np.asarray(again["grid"]).dtype == np.int64
    assert copy.deepcopy(inputs) is inputs
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(again["pixel_values"])[0, 0] = 1.0


# -- samples, dumps, batches -----------------------------------------------------------------------------


def test_a_sample_keeps_its_images_in_json_and_in_dumps(tmp_path: Path) -> None:
    sample = finished(3, write_image(tmp_path / "a.png", 1))
    again = Sample.from_dict(orjson.loads(orjson.dumps(sample.to_dict())))
    assert again.multimodal_inputs == sample.multimodal_inputs
    assert again.multimodal_train_inputs == TrainInputs.of(sample.multimodal_train_inputs)
    assert again.image_data() == sample.image_data()
    assert again.image_data()[0].startswith("data:image/png;base64,")
    write_samples(tmp_path / "dump.jsonl", [sample, finished(4)])
    first, second = read_samples(tmp_path / "dump.jsonl")
    assert first.to_dict() == {**sample.to_dict(), **{k: v for k, v in first.to_dict().items() if k == "spans"}}
    assert second.multimodal_inputs is None
    assert second.image_data() == []
    sample.reset_for_retry()
    assert sample.image_data(), "a prompt keeps its images"
    assert sample.multimodal_train_inputs is not None


def test_images_that_the_trainer_could_not_see_are_an_error() -> None:
    sample = Sample(index=3, multimodal_inputs={"images": []})
    assert multimodal_column([sample], [False]) is None
    sample.multimodal_inputs = {"images": ["data:image/png;base64,AA=="]}
    with pytest.raises(RolloutError, match="sample 3 has multimodal_inputs but no multimodal_train_inputs"):
        multimodal_column([sample], [False])
    assert multimodal_column([sample], [True]) is None, "a placeholder row has other tokens"


@pytest.mark.parametrize(
    "value",
    [
        [1],
        {"a": "text"},
        {"a": [2**63]},
        {"a": [1e300]},
        {"a": {"dtype": "float32", "shape": [3], "base64": "AAAA"}},
        {"a": {"shape": [1]}},
    ],
)
def test_what_are_no_train_inputs_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="multimodal_train_inputs"):
        TrainInputs.of(value)
