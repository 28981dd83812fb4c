"""Settings of evaluation (`None` means: the rollout's value), and the data sets they resolve to."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from slime_core.config.sections.base import ContextLength, File, Flag, Section, Share, TopK


class EvalArgs(Section):
    """Evaluation."""

    eval_interval: PositiveInt | None = None
    """Rollouts between evaluations."""
    eval_prompt_data: Annotated[list[str] | None, Flag(metavar="NAME PATH", holds="pairs")] = None
    """Names and files of evaluation data, in pairs; repeatable. A file alone is called by its name without suffix. A
    file may be a data set of the Hugging Face hub, as --prompt-data says."""
    eval_config: File = None
    """YAML file with evaluation data and their settings."""
    eval_function_path: str | None = None
    """Replaces the evaluation; --rollout-function-path when not given."""
    skip_eval_before_train: bool = False
    """Do not evaluate before the first rollout."""
    n_samples_per_eval_prompt: PositiveInt = 1
    """Responses per evaluation prompt."""
    eval_input_key: str | None = None
    """Column of the prompt in evaluation data."""
    eval_label_key: str | None = None
    """Column of the reference answer in evaluation data."""
    eval_tool_key: str | None = None
    """Column of the tool definitions in evaluation data."""
    eval_temperature: NonNegativeFloat | None = None
    """Sampling temperature; 0 is greedy."""
    eval_top_p: Share | None = None
    """Nucleus sampling."""
    eval_top_k: TopK | None = None
    """Sample from the k likeliest tokens; -1 is all."""
    eval_max_response_len: PositiveInt | None = None
    """Longest response, in tokens."""
    eval_max_prompt_len: PositiveInt | None = None
    """Longer prompts are left out, in tokens."""
    eval_min_new_tokens: NonNegativeInt | None = None
    """Shortest response, in tokens."""
    eval_max_context_len: ContextLength | None = None
    """Longest prompt and response together, in tokens."""
    eval_answer_path: str | None = None
    """What extracts answers for majority@k: a reward's name, or a function's path; each data set's reward, if it can,
    when not given."""
    resume: Annotated[str | None, Flag(metavar="RUN", holds="path")] = None
    """slime eval: go on in this run directory, with its settings, where an evaluation was interrupted."""


class EvalDataset(BaseModel):
    """One evaluation data set with all settings resolved."""

    model_config = ConfigDict(extra="forbid")

    name: str
    """In metric names: `eval/<name>`."""
    path: str
    """JSONL or parquet file; `path@[a:b]` takes a slice."""
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str = "tools"
    metadata_key: str = "metadata"
    multimodal_keys: dict[str, Any] | None = None
    system_prompt: str | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = {}
    n_samples_per_eval_prompt: PositiveInt = 1
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: Share = 1.0
    top_k: TopK = -1
    max_response_len: PositiveInt | None = None
    max_prompt_len: PositiveInt | None = None
    max_context_len: ContextLength | None = None
    min_new_tokens: NonNegativeInt | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    repetition_penalty: PositiveFloat | None = None
    skip_special_tokens: bool = False
    no_stop_trim: bool = True
    """Keep the stop string in the response."""
    sampling_params: dict[str, Any] = {}
    """Further settings of the engine's sampler, under SGLang's names (`min_p`, `frequency_penalty`, ...)."""
    custom_generate_function_path: str | None = None
    environment_path: str | None = None
    """For generate functions that act in one; --environment-path when not given."""
    tools_path: list[str] | None = None
    """What its samples may call; --tools-path when not given."""
    plugins: dict[str, dict[str, Any]] = {}
    """Options of its generate function, environment and reward, laid over the run's."""
    answer_path: str | None = None
    """What extracts answers for majority@k: a reward's name or a function's path; the data set's reward, if it can."""
    ks: list[PositiveInt] | None = None
    """The k of pass@k and majority@k, each at most n_samples_per_eval_prompt; 1, 2, 4, ... and n when not given."""
    metadata_overrides: dict[str, Any] = {}
    """Laid over every sample's metadata."""

    @model_validator(mode="after")
    def _ks_are_possible(self) -> EvalDataset:
        if self.ks is not None:
            self.ks = sorted(set(self.ks))
            if self.ks and self.ks[-1] > self.n_samples_per_eval_prompt:
                raise ValueError(
                    f"k = {self.ks[-1]} of {self.n_samples_per_eval_prompt} samples per prompt; lower it, or raise"
                    " n_samples_per_eval_prompt"
                )
        taken = sorted({"max_new_tokens", "sampling_seed", "n"} & self.sampling_params.keys())
        if taken:
            raise ValueError(f"sampling_params {taken[0]!r} has a setting of its own, or is chosen per sample")
        return self
