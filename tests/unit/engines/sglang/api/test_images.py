"""Images of a request: as they were given, on every try and in the request for an answer's rest."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slime_engine_http.api.flights import Flight
from slime_engine_http.api.requests import generate_request

from slime_core.errors import EngineError
from slime_core.protocols import GenerateTraits
from slime_core.rollout.generate import _check_images
from slime_core.sample import GenerationOutput, Sample
from tests.unit.engines.sglang.api.servers import engine_at, servers, well

PNG = "data:image/png;base64,iVBORw=="


PNG_FILE = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize("wrong", ["/etc/passwd", "https://example.org/a.png", b"bytes"])
def test_a_server_is_never_asked_to_fetch(wrong: Any) -> None:
    with pytest.raises(EngineError, match="is no data:image"):
        generate_request([1], {}, "r", image_data=[wrong])


@pytest.mark.parametrize(("sampled", "rest"), [([5], [1, 9, 2, 5]), ([5, 9], [1, 9, 2])])
async def test_an_answer_with_the_token_of_images_is_asked_as_a_whole(
    sampled: list[int], rest: list[int], tmp_path: Path
) -> None:
    """Its rest would need an image more than there is."""
    (tmp_path / "config.json").write_text('{"image_token_id": 9}')
    async with servers(well) as (server,), engine_at(server, hf_checkpoint=str(tmp_path)) as engine:
        assert engine._client is not None
        flight = engine._client._flight([1, 9, 9, 2], {"max_new_tokens": 8}, None, None, [PNG], None)
        cut = GenerationOutput(sampled, [-0.5] * len(sampled), "x", {"prompt_tokens": 4})
        await engine._client._go_on(flight, cut)
        assert flight.body["input_ids"] == rest


def test_servers_are_sent_one_token_for_each_image() -> None:
    ids = [1, 9, 9, 9, 2, 9, 3]
    body = generate_request(ids, {}, "r", image_data=[PNG, PNG], image_token=9)
    assert body["input_ids"] == [1, 9, 2, 9, 3]
    assert generate_request(ids, {}, "r", image_token=9)["input_ids"] == ids, "no images: the ids are the caller's"
    with pytest.raises(EngineError, match="2 runs of the image token 9, and 1 images"):
        generate_request(ids, {}, "r", image_data=[PNG], image_token=9)


def test_a_server_that_makes_other_tokens_of_an_image_is_found_out() -> None:
    flight = Flight({}, None, prompt=7)
    flight.whole(GenerationOutput([5], [-0.5], "x", {"prompt_tokens": 7}))
    with pytest.raises(EngineError, match="read a prompt with images as 8 tokens, and slime as 7: their image proc"):
        flight.whole(GenerationOutput([5], [-0.5], "x", {"prompt_tokens": 8}))


def test_a_generate_function_that_leaves_images_out_gets_no_sample_with_images() -> None:
    from slime_core.errors import RolloutError

    sample = Sample(index=0, tokens=[3], multimodal_inputs={"images": [PNG_FILE]})
    with pytest.raises(RolloutError, match="which mine does not give to the engine"):
        _check_images(sample, SimpleNamespace(label="mine", traits=GenerateTraits()))  # type: ignore[arg-type]
    _check_images(sample, SimpleNamespace(label="mine", traits=GenerateTraits(takes_images=True)))  # type: ignore[arg-type]
    sample.tokens = []
    with pytest.raises(RolloutError, match="images but no tokens"):
        _check_images(sample, SimpleNamespace(label="mine", traits=GenerateTraits(takes_images=True)))  # type: ignore[arg-type]
    _check_images(Sample(), SimpleNamespace(label="mine", traits=GenerateTraits()))  # type: ignore[arg-type]
