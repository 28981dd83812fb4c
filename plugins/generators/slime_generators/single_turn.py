"""Default generate function: a single response to each prompt.

A partial sample is continued from its last token; its response tokens count against `max_new_tokens`.
"""

from __future__ import annotations

from typing import Any

from slime_core import Args, GenerateContext, GenerateTraits, Sample, SampleStatus, declares


@declares(GenerateTraits(takes_images=True))
async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext) -> Sample:
    """Continue `sample.tokens` ([prompt + response so far]) until the model stops or `max_new_tokens` is reached.

    Raises:
        ValueError: The sample has no prompt tokens.
        EngineError: The engine refused the request or stopped answering.
    """
    if not sample.tokens:
        raise ValueError(f"sample {sample.index} has no prompt tokens; the data source sets `Sample.tokens`")
    room = int(sampling_params["max_new_tokens"]) - sample.response_length
    if room <= 0:
        sample.status = SampleStatus.TRUNCATED
        return sample
    images: Any = {"image_data": sample.image_data()} if sample.multimodal_inputs else {}
    output = await context.engine.generate(
        sample.tokens, {**sampling_params, "max_new_tokens": room}, session_id=sample.session_id, **images
    )
    sample.append_response_tokens(
        args, output.token_ids, output.log_probs, meta_info=output.meta_info, text=output.text
    )
    return sample
