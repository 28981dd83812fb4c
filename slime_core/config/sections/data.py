"""Settings of prompts, batches and how long to go on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slime_core.config.sections.base import FILE, Flag, Section


class DataArgs(Section):
    """Data."""

    num_rollout: Annotated[int | None, Field(ge=0)] = None
    """Number of rollouts; wins over --num-epoch."""
    num_epoch: Annotated[int | None, Field(gt=0)] = None
    """Passes over the prompt data: (prompts // --rollout-batch-size) rollouts each."""
    start_rollout_id: Annotated[int | None, Field(ge=0)] = None
    """Rollout to start with; the checkpoint's next one when not given."""
    prompt_data: Annotated[str | None, FILE] = None
    """JSONL or parquet file with prompts; `path@[a:b]` takes a slice of its rows."""
    data_source_path: str | None = None
    """Data source: a plugin name or a path to a class(args); the built-in reader of --prompt-data when not given."""
    num_data_workers: Annotated[int, Field(ge=0)] = 0
    """Threads that read and tokenise prompts ahead of the rollouts; 0 reads each when it is drawn."""
    streaming_data: bool = False
    """Read --prompt-data from its beginning as it is drawn, without looking through the whole file first."""
    rollout_global_dataset: Annotated[bool, Flag(off="--disable-rollout-global-dataset")] = True
    """Let the framework read and shuffle --prompt-data; disable when your functions manage the data."""
    input_key: str | None = None
    """Column of the prompt: text or chat messages. By default `input`, or what the usual columns of data sets are
    (docs/concepts/data.md), the answer's among them."""
    label_key: str | None = None
    """Column of the reference answer."""
    system_prompt: str | None = None
    """System message that every prompt begins with, evaluation's too; a row with a system message keeps its own."""
    metadata_key: str = "metadata"
    """Column of the sample's metadata."""
    tool_key: str = "tools"
    """Column of the tool definitions given to the chat template."""
    multimodal_keys: dict[str, Any] | None = None
    """Columns of images, as JSON: {"image": "images"}; one image for each `<image>` in the prompt."""
    apply_chat_template: bool = False
    """Turn messages into text with the tokenizer's chat template."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the chat template, as JSON."""
    loss_mask_type: Literal["auto", "qwen", "qwen3", "qwen3_5", "distill_qwen"] = "auto"
    """What loss masks of chat messages (supervised fine-tuning) must agree with; they follow from the chat template:
    each assistant turn as it would be sampled, end token included. `qwen`, `qwen3`: what the template writes for each
    message alone; `qwen3_5`: what stands between ChatML marks in the whole text; `distill_qwen`: the last turn only."""
    rollout_batch_size: Annotated[int | None, Field(gt=0)] = None
    """Prompts per rollout; required to train."""
    n_samples_per_prompt: Annotated[int, Field(gt=0)] = 1
    """Responses per prompt: the group size."""
    global_batch_size: Annotated[int | None, Field(gt=0)] = None
    """Samples per optimizer step; a whole rollout when neither this nor --num-steps-per-rollout is given."""
    num_steps_per_rollout: Annotated[int | None, Field(gt=0)] = None
    """Optimizer steps per rollout; sets --global-batch-size."""
    micro_batch_size: Annotated[int, Field(gt=0)] = 1
    """Samples per forward pass; without effect with --use-dynamic-batch-size."""
    use_dynamic_batch_size: bool = False
    """Fill each forward pass up to --max-tokens-per-gpu tokens."""
    max_tokens_per_gpu: Annotated[int | None, Field(gt=0)] = None
    """Tokens per forward and backward pass."""
    log_probs_max_tokens_per_gpu: Annotated[int | None, Field(gt=0)] = None
    """Tokens per forward pass without gradient."""
    balance_data: bool = False
    """Give every data-parallel rank about the same number of floating point operations."""
    balance_by_flops: bool = False
    """Pack micro-batches by floating point operations instead of tokens."""
    data_pad_size_multiplier: Annotated[int, Field(gt=0)] = 128
    """Packed sequences are padded to a multiple of this."""
