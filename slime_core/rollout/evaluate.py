"""Evaluation: data sets -> rewards, through the same generate and reward stages as training.

Settings come from the data set's entry, then `--eval-*`, then `--rollout-*`. Each data set has its own number of
samples per prompt, and pass@k uses that number. All data sets run at once, in the order of their samples' places in the
engine, so long responses in one data set do not delay the others. A sample's seed comes from its number in its data
set, so neither the order nor an existing record changes the sampled tokens.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any, Protocol

from slime_core.config.sections.evaluation import EvalDataset
from slime_core.data.prompts import eval_samples
from slime_core.distributions import offered
from slime_core.errors import RolloutError
from slime_core.protocols import Args, DataSource
from slime_core.rollout.deadlines import all_done, group_runner
from slime_core.rollout.generate import SampleRunner
from slime_core.rollout.reward import number_problem
from slime_core.sample import Group, RolloutFnEvalOutput, Sample, SampleStatus


def eval_sampling_params(args: Args, dataset: EvalDataset) -> dict[str, object]:
    """Return a data set's sampling settings under SGLang's names, as a new dictionary each call."""
    params = {
        "temperature": dataset.temperature,
        "top_p": dataset.top_p,
        "top_k": dataset.top_k,
        "max_new_tokens": dataset.max_response_len,
        "min_new_tokens": dataset.min_new_tokens,
        "stop": dataset.stop,
        "stop_token_ids": dataset.stop_token_ids,
        "repetition_penalty": dataset.repetition_penalty,
        "skip_special_tokens": dataset.skip_special_tokens,
        "no_stop_trim": dataset.no_stop_trim,
        "spaces_between_special_tokens": False,
    }
    params |= copy.deepcopy(dataset.sampling_params)
    return {name: value for name, value in params.items() if value is not None}


def dataset_args(args: Args, dataset: EvalDataset) -> Args:
    """Return the run's settings with the data set's template, tools, environment and plugin options.

    The data set's generate functions see all of them. Rewards see the options only.
    """
    changes: dict[str, object] = {}
    for name in ("apply_chat_template", "apply_chat_template_kwargs"):
        if getattr(args, name) != getattr(dataset, name):
            changes[name] = getattr(dataset, name)
    if dataset.environment_path:
        changes["environment_path"] = dataset.environment_path
    if dataset.tools_path is not None:
        changes["tools_path"] = dataset.tools_path
    if dataset.plugins:
        run, own = args.plugins, dataset.plugins  # merged option by option
        changes["plugins"] = {name: {**run.get(name, {}), **own.get(name, {})} for name in {**run, **own}}
    return args.model_copy(update=changes) if changes else args


class EvalRecord(Protocol):
    """A record of evaluated groups, which are not evaluated again (kept by `slime eval`)."""

    total: int
    """Number of groups of all data sets."""

    def finished(self, name: str) -> dict[int, Group]:
        """Return the data set's recorded groups by number; the samples have their rewards."""

    async def add(self, name: str, number: int, group: Group) -> None:
        """Record a finished group."""


async def evaluate_datasets(
    args: Args,
    data_source: DataSource,
    runner: SampleRunner,
    rollout_id: int | None,
    *,
    record: EvalRecord | None = None,
) -> RolloutFnEvalOutput:
    """Generate and score every data set of `args.eval_datasets`, all at once. `data_source` is not touched.

    Args:
        args: The run's settings.
        data_source: The training's data source.
        runner: Generates and scores samples.
        rollout_id: Number of finished rollouts.
        record: Record of evaluated groups: its groups are not evaluated again, and new groups are added to it.
    """
    work = []
    for place, dataset in enumerate(args.eval_datasets):
        own = dataset_args(args, dataset)
        groups = eval_samples(own, dataset, runner.tokenizer)
        for sample in (s for group in groups for s in group):
            # Unique in the whole evaluation: agents and engines distinguish conversations by it.
            sample.session_id = f"1-{place}-{sample.group_index}-{sample.index}"
        work.append((dataset, own, groups, record.finished(dataset.name) if record is not None else {}))
    if record is not None:
        record.total = sum(len(groups) for _, _, groups, _ in work)

    async def one(dataset: EvalDataset, own: Args, group: Group, kept: Group | None, number: int) -> Group:
        if kept is not None:
            return kept
        finished = await _evaluate_group(args, own, dataset, runner, group, rollout_id)
        if any(s.status == SampleStatus.ABORTED for s in finished):
            return finished
        _fail_unscored(args, finished)
        if record is not None:
            await record.add(dataset.name, number, finished)
        return finished

    runs = [
        asyncio.gather(*(one(d, own, group, kept.get(i), i) for i, group in enumerate(groups)))
        for d, own, groups, kept in work
    ]
    names = ", ".join(dataset.name for dataset in args.eval_datasets)
    done = await all_done(asyncio.gather(*runs), runner, f"evaluation on {names}")
    data = {}
    for (dataset, *_), groups in zip(work, done, strict=True):
        columns = eval_columns(args, [sample for group in groups for sample in group])
        data[dataset.name] = columns | _votes(args, dataset, columns["samples"])
    return RolloutFnEvalOutput(data)


async def _evaluate_group(
    args: Args, own: Args, dataset: EvalDataset, runner: SampleRunner, group: Group, rollout_id: int | None
) -> Group:
    """Return the group with responses and rewards; retry if the end of a concurrent rollout aborted its requests.

    A weight update waits for a running evaluation, so no more rollouts can end meanwhile than the loop has attempts.
    """
    params = eval_sampling_params(args, dataset)
    keywords = {} if own is args else {"args": own}
    for _ in range(args.update_weights_interval + 2):
        finished = await group_runner(runner)(group, params, rollout_id=rollout_id, evaluation=True, **keywords)
        if not any(sample.status == SampleStatus.ABORTED for sample in finished):
            break
        for sample in {id(s): s for s in (*group, *finished)}.values():
            sample.reset_for_retry()
    return finished


def _fail_unscored(args: Args, samples: list[Sample]) -> None:
    """Mark each sample FAILED whose reward is not a finite number.

    Such a sample was aborted in every attempt, or scored by its generate function.

    Raises:
        RolloutError: A reward is a mapping, and no setting names one of its entries.
    """
    for sample in samples:
        if sample.status != SampleStatus.FAILED:
            problem = number_problem(_value(args, sample))
            if problem is not None:
                sample.fail("evaluation", f"its reward {problem}")


def eval_columns(args: Args, samples: list[Sample]) -> dict[str, Any]:
    """Return THUDM/slime's evaluation columns; a sample without a finite reward has failed, and counts as 0.

    Raises:
        RolloutError: A reward is a mapping, and no setting names one of its entries.
    """
    _fail_unscored(args, samples)
    failed = [sample.status == SampleStatus.FAILED for sample in samples]
    return {
        "rewards": [0.0 if lost else float(_value(args, s)) for s, lost in zip(samples, failed)],
        "truncated": [s.status == SampleStatus.TRUNCATED for s in samples],
        "samples": samples,
    }


def _votes(args: Args, dataset: EvalDataset, samples: list[Sample]) -> dict[str, object]:
    """Return `ks` if the data set names them, and `answers` if every sample's answer can be extracted."""
    votes: dict[str, object] = {} if dataset.ks is None else {"ks": dataset.ks}
    read = offered("slime.data", "answers") if int(dataset.n_samples_per_eval_prompt) > 1 else None
    if read is not None and (answers := read.votes(args, dataset, samples)) is not None:
        votes["answers"] = answers
    return votes


def _value(args: Args, sample: Sample) -> Any:
    """Return the reward, or its entry that counts."""
    if not isinstance(sample.reward, dict):
        return sample.reward
    key = args.eval_reward_key or args.reward_key
    if key not in sample.reward:
        asked = f"{key!r} is not among them" if key else "no setting names one"
        raise RolloutError(
            f"evaluation: the reward of sample {sample.index} is a mapping with keys"
            f" {', '.join(map(repr, sample.reward)) or 'none'}, and {asked}: --eval-reward-key KEY"
        )
    return sample.reward[key]
