"""Settings of prompts, batches and how long to go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from slime_core.config.sections.base import File, NoEffect, Refused, Rule, Section, Switch
from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from slime_core.config.schema import Given
    from slime_core.config.settings import Settings


class DataArgs(Section):
    """Data."""

    num_rollout: NonNegativeInt | None = None
    """Number of rollouts; wins over --num-epoch."""
    num_epoch: PositiveInt | None = None
    """Passes over the prompt data: (prompts // --rollout-batch-size) rollouts each."""
    start_rollout_id: NonNegativeInt | None = None
    """Id of the rollout to start with, counted from 0 as in THUDM/slime; the checkpoint's next one when not given."""
    prompt_data: File = None
    """JSONL or parquet file with prompts; `path@[a:b]` takes a slice of its rows. `hf:org/name[:config][[split]]` is a
    data set of the Hugging Face hub."""
    data_source_path: str | None = None
    """Data source: a plugin name or a path to a class(args); the built-in reader of --prompt-data when not given."""
    num_data_workers: NonNegativeInt = 0
    """Threads that read and tokenise prompts ahead of the rollouts; 0 reads each when it is drawn."""
    streaming_data: bool = False
    """Read --prompt-data from its beginning as it is drawn, without looking through the whole file first."""
    rollout_global_dataset: Switch = True
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
    apply_chat_template_kwargs: dict[str, Any] = {}
    """Keyword arguments of the chat template, as JSON."""
    content_special_tokens: Literal["neutralise", "refuse", "keep"] = "neutralise"
    """Control tokens in what tools, environments, pages and agents say, where a chat template writes it: spelled as
    ordinary text; the sample fails (`refuse`); or read as control tokens, which end the message (`keep`). Those in
    users' messages are warned of."""
    loss_mask_type: Literal["auto", "qwen", "qwen3", "qwen3_5", "distill_qwen"] = "auto"
    """What loss masks of chat messages (supervised fine-tuning) must agree with; they follow from the chat template:
    each assistant turn as it would be sampled, end token included. `qwen`, `qwen3`: what the template writes for each
    message alone; `qwen3_5`: what stands between ChatML marks in the whole text; `distill_qwen`: the last turn only."""
    rollout_batch_size: PositiveInt | None = None
    """Prompts per rollout; required to train."""
    n_samples_per_prompt: PositiveInt = 1
    """Responses per prompt: the group size."""
    global_batch_size: PositiveInt | None = None
    """Samples per optimizer step; a whole rollout when neither this nor --num-steps-per-rollout is given."""
    num_steps_per_rollout: PositiveInt | None = None
    """Optimizer steps per rollout; sets --global-batch-size."""
    micro_batch_size: PositiveInt | None = None
    """Samples per forward pass; without effect with --use-dynamic-batch-size."""
    use_dynamic_batch_size: bool = False
    """Fill each forward pass up to --max-tokens-per-gpu tokens; the default if nothing about the size of passes is
    given."""
    max_tokens_per_gpu: PositiveInt | None = None
    """Tokens per forward and backward pass; a longer sample has one of its own. By default 4096, or with the embedded
    trainer what memory allows: less where it is short, up to 32768 on a GPU."""
    log_probs_max_tokens_per_gpu: PositiveInt | None = None
    """Tokens per forward pass without gradient."""
    balance_data: bool = False
    """Give every data-parallel rank about the same number of floating point operations."""
    balance_by_flops: bool = False
    """Pack micro-batches by floating point operations instead of tokens."""
    data_pad_size_multiplier: PositiveInt = 128
    """Packed sequences are padded to a multiple of this."""


_TOKENS_PER_PASS = 4096
"""From a few thousand on larger passes gain nothing, and take memory."""


def _of_sft(s: Settings) -> None:
    """Supervised fine-tuning: one sample per prompt, no advantages."""
    if s.command != "sft":
        return
    if s.args.n_samples_per_prompt != 1:
        raise ConfigError(f"{s.cite('n_samples_per_prompt')}: supervised fine-tuning takes one sample per prompt.")
    if s.args.eval_interval is not None and not s.args.eval_function_path:
        raise ConfigError(f"{s.cite('eval_interval')}: slime sft runs no engine; use slime eval on its checkpoints.")
    its_own = {"rollout_function_path": "sft", "loss_type": "sft_loss", "compute_advantages_and_returns": False}
    for name, value in its_own.items():
        if not s.is_given(name):
            s.derive(name, value, "slime sft")
    a: Given = s.args
    if a.rollout_batch_size is None and a.global_batch_size is not None:
        s.derive("rollout_batch_size", a.global_batch_size, "global_batch_size")


def _prompts(s: Settings) -> None:
    """Training and rollouts need prompts, unless the user's code brings them."""
    a = s.args
    brings_own = a.data_source_path or a.rollout_function_path or not a.rollout_global_dataset or a.debug_train_only
    if s.command in ("train", "sft", "rollout") and not a.prompt_data and not brings_own:
        raise ConfigError("--prompt-data is required: a JSONL or parquet file.")
    if a.streaming_data and a.rollout_shuffle:
        s.warnings.append(
            f"{s.cite('streaming_data')} has no effect with {s.cite('rollout_shuffle')}, which orders all rows."
        )
        s.derive("streaming_data", False, "rollout_shuffle")


_MOST_SAMPLES = 10**7
_SAMPLE_BYTES = 2000
"""Memory of a sample without its text and tokens."""


def _batch_sizes(s: Settings) -> None:
    """rollout_batch_size * n_samples_per_prompt = global_batch_size * num_steps_per_rollout."""
    a: Given = s.args
    if a.rollout_batch_size is None:
        if s.command in ("train", "sft", "rollout"):
            raise ConfigError("--rollout-batch-size is required: the number of prompts per rollout.")
        return
    samples = a.rollout_batch_size * a.n_samples_per_prompt
    product = s.cited(f"{{rollout_batch_size}} * {{n_samples_per_prompt}} = {samples} samples per rollout")
    if samples > _MOST_SAMPLES:
        raise ConfigError(
            f"{product}, which need at least {samples * _SAMPLE_BYTES / 1e9:,.0f} GB of memory; allowed: at most"
            f" {_MOST_SAMPLES:,}. Type smaller numbers, and more rollouts (--num-rollout)"
        )
    steps, per_step = a.num_steps_per_rollout, a.global_batch_size
    if steps is not None and per_step is not None and samples != steps * per_step:
        raise ConfigError(
            f"{product}, but {s.cite('global_batch_size')} * {s.cite('num_steps_per_rollout')} = {steps * per_step};"
            " drop one of the last two, or make the products equal."
        )
    if steps is not None and samples % steps:
        raise ConfigError(f"{product} cannot be divided into {s.cite('num_steps_per_rollout')}.")
    if per_step is not None and samples % per_step:
        raise ConfigError(f"{product} cannot be divided by {s.cite('global_batch_size')}; the rest would be lost.")
    if per_step is None:
        per_step = samples // (steps or 1)
        why = "rollout_batch_size * n_samples_per_prompt" + (" / num_steps_per_rollout" if steps else "")
        s.derive("global_batch_size", per_step, why)
    if steps is None:
        why = "rollout_batch_size * n_samples_per_prompt / global_batch_size"
        s.derive("num_steps_per_rollout", samples // per_step, why)


def _packing(s: Settings) -> None:
    """Fill passes unless the user asks otherwise: one of a single sample takes many times its share of a full one."""
    a: Given = s.args
    if a.max_tokens_per_gpu or (a.micro_batch_size is not None and not a.use_dynamic_batch_size):
        return
    if s.is_given("use_dynamic_batch_size") and not a.use_dynamic_batch_size:
        s.derive("micro_batch_size", 1, "use_dynamic_batch_size")
        return
    if not a.use_dynamic_batch_size:
        s.derive("use_dynamic_batch_size", True, "no micro_batch_size")
    s.derive("max_tokens_per_gpu", _TOKENS_PER_PASS, "use_dynamic_batch_size")


def _length_of_run(s: Settings) -> None:
    """`--num-rollout` wins over `--num-epoch`; training needs one of them."""
    a: Given = s.args
    if a.num_rollout is not None:
        return
    if a.num_epoch is not None and not (a.rollout_global_dataset and (a.prompt_data or a.data_source_path)):
        raise ConfigError(f"{s.cite('num_epoch')} needs --prompt-data; without it give --num-rollout N.")
    if a.num_epoch is None and s.command in ("train", "sft"):
        raise ConfigError("--num-rollout N or --num-epoch N is required.")
    if a.num_epoch is None and s.command == "rollout":
        s.derive("num_rollout", 1, "slime rollout")


RULES: tuple[Rule, ...] = (
    _of_sft,
    _prompts,
    _batch_sizes,
    _packing,
    Refused(
        lambda a: a.max_tokens_per_gpu and not a.use_dynamic_batch_size,
        "{max_tokens_per_gpu} needs --use-dynamic-batch-size.",
    ),
    Refused(
        lambda a: a.balance_by_flops and not a.use_dynamic_batch_size,
        "{balance_by_flops} needs --use-dynamic-batch-size.",
    ),
    NoEffect("micro_batch_size", lambda a: a.use_dynamic_batch_size, "with {use_dynamic_batch_size}"),
    NoEffect("num_epoch", lambda a: a.num_rollout is not None, "with {num_rollout}"),
    _length_of_run,
)
