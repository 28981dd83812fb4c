"""Take reward functions that were written for other trainers as they are.

`plugins.resolve` offers every reward to `adapt` (entry-point group `slime.signatures`). A function is recognised by the
names of its parameters, and is called with keywords::

    TRL             f(prompts, completions, completion_ids, **columns) -> list[float | None]
    verl            compute_score(data_source, solution_str, ground_truth, extra_info) -> float or {"score": ...}
    verl, batched   compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> list
    OpenRLHF        reward_func(queries, prompts, labels) -> tensor, list or {"rewards": ..., "extra_logs": {...}}
    verifiers       f(prompt, completion, answer, state, task, info) -> float
    verifiers       f(prompts, completions, answers, states, tasks, infos) -> list[float]
    open-instruct   f(tokenized_prediction, prediction, label, query) -> float or an object with `score`

Each has a subset of its parameters, and may be async, a class or an object. The names come from the projects'
documentation. Columns of the data are read from the sample's row (`source_name`, `source_index` of its metadata).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core import Args, RewardTraits, Sample, hookimpl
from slime_core.errors import PluginError, PluginSignatureError
from slime_core.plugins.signatures import is_async, signature_of, unbound

if TYPE_CHECKING:
    from slime_core.data.dataset import Rows
    from slime_core.launch.prepare import Prepared
    from slime_core.protocols.command import Finding

__all__ = ["Form", "adapt", "form_of", "slime_preflight"]


@dataclass(frozen=True)
class Form:
    """A signature of another project."""

    project: str
    marks: frozenset[str]
    """Parameter names of which one is enough to recognise the form."""
    given: Callable[[Sequence[Answer]], dict[str, Any]]
    """Function from the answers to the keywords that the project passes."""
    differs: str
    """Difference from the project, in one line."""
    batched: bool = True
    """Whether a call takes a list of answers."""
    columns: bool = False
    """Whether columns of the data are keywords, too."""
    refused: tuple[str, ...] = ()
    """Parameters of the project that have no counterpart here."""


class Answer:
    """A sample as other projects see it: without special tokens, with the row that it came from."""

    def __init__(self, args: Args, sample: Sample, evaluation: bool) -> None:
        self.args, self.sample = args, sample
        self.source = _source(args, sample, evaluation)
        self.row: Mapping[str, Any] = {}
        if self.source is not None:
            self.row = _rows(str(self.source.path))[sample.metadata["source_index"]]
        self.text = _without_special_tokens(args.hf_checkpoint, sample.response)
        self.ids = sample.tokens[len(sample.tokens) - sample.response_length :]

    @property
    def prompt(self) -> str | list[dict[str, Any]]:
        """The prompt as it is in the data: text, or chat messages."""
        if self.source is None:
            return self.sample.prompt
        from slime_data.layouts import recognise

        from slime_core.data.rows import checked_prompt

        key = self.source.input_key
        if key is None:
            prompt: str | list[dict[str, Any]] = recognise(self.row, self.source.label_key).read(self.row)[0]
            return prompt
        return checked_prompt(self.row[key], key)

    @property
    def completion(self) -> str | list[dict[str, Any]]:
        """The response: a message if the prompt is chat messages, otherwise text."""
        return self.text if isinstance(self.prompt, str) else [{"role": "assistant", "content": self.text}]

    @property
    def rendered(self) -> str:
        """The prompt as text."""
        prompt = self.sample.prompt
        return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)

    def column(self, name: str, default: Any = None) -> Any:
        """Return a column of the row; without a row, an entry of the metadata."""
        return self.row.get(name, self.sample.metadata.get(name, default))

    @property
    def truth(self) -> Any:
        """The reference answer, in verl's columns or the label."""
        nested = self.row.get("reward_model")
        if isinstance(nested, Mapping) and "ground_truth" in nested:
            return nested["ground_truth"]
        return self.row.get("ground_truth", self.sample.label)

    @property
    def state(self) -> dict[str, Any]:
        """The rollout, as functions of verifiers read it."""
        return {
            "prompt": self.prompt,
            "completion": self.completion,
            "answer": self.column("answer", self.sample.label),
            "task": self.column("task", self.source_name),
            "info": self.column("info", self.sample.metadata),
            "is_truncated": self.sample.status.value == "truncated",
        }

    @property
    def source_name(self) -> str:
        """The name of the data set."""
        return str(self.sample.metadata.get("source_name", ""))


def _trl(answers: Sequence[Answer]) -> dict[str, Any]:
    ids = [answer.ids for answer in answers]
    given = {
        "prompts": [answer.prompt for answer in answers],
        "completions": [answer.completion for answer in answers],
        "completion_ids": ids,
        "completions_ids": ids,
        "log_extra": _ignored,
        "log_metric": _ignored,
    }
    names = dict.fromkeys(name for answer in answers for name in answer.row if name != "prompt")
    return {**{name: [answer.column(name) for answer in answers] for name in names}, **given}


def _ignored(*args: Any, **kwargs: Any) -> None:
    """Accept what TRL would log."""


def _verl(answers: Sequence[Answer]) -> dict[str, Any]:
    (answer,) = answers
    return {
        "data_source": answer.column("data_source", answer.source_name),
        "solution_str": answer.text,
        "ground_truth": answer.truth,
        "extra_info": answer.column("extra_info", answer.sample.metadata),
    }


def _open_rlhf(answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "queries": [answer.rendered + answer.sample.response for answer in answers],
        "prompts": [answer.rendered for answer in answers],
        "labels": [answer.sample.label for answer in answers],
    }


def _verifiers(answers: Sequence[Answer]) -> dict[str, Any]:
    (answer,) = answers
    return {**answer.state, "state": answer.state}


def _open_instruct(answers: Sequence[Answer]) -> dict[str, Any]:
    (answer,) = answers
    return {
        "tokenized_prediction": answer.ids,
        "prediction": answer.text,
        "label": answer.sample.label,
        "query": answer.rendered,
        "rollout_state": None,
    }


def _listed(one: Callable[[Sequence[Answer]], dict[str, Any]]) -> Callable[[Sequence[Answer]], dict[str, Any]]:
    """Return the plural of a form: every keyword with an `s`, and a list of values."""

    def given(answers: Sequence[Answer]) -> dict[str, Any]:
        each = [one([answer]) for answer in answers]
        return {f"{name}s": [values[name] for values in each] for name in each[0]}

    return given


FORMS = (
    Form(
        "verl",
        frozenset({"solution_str"}),
        _verl,
        "of a mapping `score` trains, and other entries are kept as components with --reward-key score",
        batched=False,
    ),
    Form(
        "verl",
        frozenset({"solution_strs"}),
        _listed(_verl),
        "a call has one answer, or a group with --group-rm, not the batch",
    ),
    Form(
        "open-instruct",
        frozenset({"tokenized_prediction"}),
        _open_instruct,
        "`score` of its result trains, and `weight` is not applied: weights are terms of weighted_sum",
        batched=False,
    ),
    Form(
        "OpenRLHF",
        frozenset({"queries"}),
        _open_rlhf,
        "`rewards` trains, and `scores` and `extra_logs` are kept as components with --reward-key score; a call has one"
        " answer, or a group with --group-rm",
    ),
    Form(
        "verifiers",
        frozenset({"states", "infos"}),
        _listed(_verifiers),
        "a call has one answer, or a group with --group-rm; objects of a rubric are not passed",
        refused=("parser",),
    ),
    Form(
        "TRL",
        frozenset({"completions", "completion_ids", "completions_ids"}),
        _trl,
        "a call has one answer, or a group with --group-rm; log_extra and log_metric record nothing; None leaves a"
        " reward out of weighted_sum, and a sample without any reward fails (in TRL it gets 0)",
        columns=True,
        refused=("trainer_state", "environments"),
    ),
    Form(
        "verifiers",
        frozenset({"completion", "state"}),
        _verifiers,
        "weights of a rubric are terms of weighted_sum; objects of a rubric are not passed",
        batched=False,
        refused=("parser",),
    ),
)
"""In the order in which they are tried."""

_SLIME = frozenset({"args", "sample", "samples"})


def form_of(function: Callable[..., Any]) -> Form | None:
    """Return the form that a function's parameter names have; None for a function of slime's or any other form."""
    signature = signature_of(function)
    names = set(signature.parameters) if signature else set()
    return None if names & _SLIME else next((form for form in FORMS if form.marks & names), None)


def adapt(reward: Any) -> Any | None:
    """Return the reward in slime's form, or None if it has no form of another project.

    Raises:
        PluginSignatureError: It needs a parameter that only the other project has.
    """
    is_class = inspect.isclass(reward)
    if not callable(reward) or (is_class and not any("__call__" in vars(base) for base in reward.__mro__)):
        return None
    function = unbound(reward, "__call__") if is_class else reward
    form = form_of(function)
    if form is None:
        return None
    for name in form.refused:
        parameter = inspect.signature(function).parameters.get(name)
        if parameter is not None and parameter.default is parameter.empty:
            raise PluginSignatureError(
                f"{_name(reward)}{inspect.signature(function)}: a reward of {form.project}, whose {name!r} slime does"
                " not have; give the parameter a default, or build the object in the module"
            )
    if not is_class:
        return _called(form, reward, reward)
    members = {"__call__": _called(form, function, reward.__call__, of_class=True), "__module__": reward.__module__}
    return type(reward.__name__, (reward,), {**members, "form": form})


def _called(
    form: Form, declared: Callable[..., Any], function: Callable[..., Any], *, of_class: bool = False
) -> Callable[..., Any]:
    """Return a function in slime's form, async if the other is, with its name and traits.

    Args:
        form: Form of the function.
        declared: Function with the parameters that the project passes.
        function: Function to call.
        of_class: Whether the first argument of both is `self`.
    """

    def begin(given: tuple[Any, ...], evaluation: bool) -> Any:
        *bound, args, scored = given
        answers = [Answer(args, one, evaluation) for one in (scored if form.batched else [scored])]
        return function(*bound, **_keywords(form, declared, answers))

    def finish(given: tuple[Any, ...], evaluation: bool, result: Any) -> Any:
        reads = _reads_mappings(given[-2], evaluation)
        return [_reward(one, reads) for one in _each(result)] if form.batched else _reward(result, reads)

    def call(*given: Any, evaluation: bool = False) -> Any:
        return finish(given, evaluation, begin(given, evaluation))

    async def awaited(*given: Any, evaluation: bool = False) -> Any:
        return finish(given, evaluation, await begin(given, evaluation))

    scores: Callable[..., Any] = awaited if is_async(function) else call
    scores.__name__, scores.__doc__ = _name(declared), declared.__doc__
    scores.__module__ = declared.__module__
    names = [*(["self"] if of_class else []), "args", "samples" if form.batched else "sample"]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    evaluation = inspect.Parameter("evaluation", inspect.Parameter.KEYWORD_ONLY, default=False)
    vars(scores).update(form=form, __signature__=inspect.Signature([*parameters, evaluation]))
    if hasattr(declared, "traits") and isinstance(declared.traits, RewardTraits):
        vars(scores)["traits"] = declared.traits
    return scores


def _keywords(form: Form, function: Callable[..., Any], answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the keywords that the function takes. Raises PluginError for a column that the data does not have."""
    given = form.given(answers)
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        taken = dict(given)
    else:
        taken = {name: given[name] for name in parameters if name in given}
    for name, parameter in parameters.items():
        if name in taken or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        known = [answer.column(name) for answer in answers if name in answer.row or name in answer.sample.metadata]
        if form.columns and len(known) == len(answers):
            taken[name] = known
        elif form.columns and parameter.default is parameter.empty and not any(answer.row for answer in answers):
            taken[name] = [answer.sample.label for answer in answers]
        elif parameter.default is parameter.empty:
            columns = ", ".join(sorted(answers[0].row)) or "unknown"
            raise PluginError(
                f"{_name(function)} has the parameter {name!r}, which is no argument of {form.project} and no column"
                f" of the row; columns: {columns}"
            )
    return taken


def _each(result: Any) -> list[Any]:
    """Return a result per answer of a form that takes lists."""
    if isinstance(result, Mapping):
        extra = result.get("extra_logs") or {}
        columns = {"score": result["rewards"], **{k: v for k, v in result.items() if k == "scores"}, **extra}
        lists = {name: _plain(values) for name, values in columns.items()}
        return [dict(zip(lists, row)) for row in zip(*lists.values())]
    rewards = _plain(result)
    return rewards if isinstance(rewards, list) else [rewards]


def _plain(values: Any) -> list[Any]:
    """Return a tensor, an array or a sequence as a list."""
    found = values.tolist() if hasattr(values, "tolist") else values
    return list(found) if isinstance(found, Sequence) and not isinstance(found, str) else [found]


def _reward(value: Any, reads_mappings: bool) -> Any:
    """Return a number or None; a mapping with `score` if the run reads mappings."""
    if not isinstance(value, Mapping):
        score = value.score if hasattr(value, "score") else value
        return {"score": score} if reads_mappings else score
    if "score" not in value:
        raise PluginError(f"the mapping has the keys {', '.join(map(repr, value))}; 'score' must be one of them")
    return dict(value) if reads_mappings else value["score"]


def _reads_mappings(args: Args, evaluation: bool) -> bool:
    key = args.eval_reward_key if evaluation else args.reward_key
    return bool(key or args.custom_reward_post_process_path)


def _name(reward: Any) -> str:
    return str(reward.__name__ if hasattr(reward, "__name__") else type(reward).__name__)


# -- the row of a sample


@dataclass(frozen=True)
class _Source:
    """A file of rows, and the columns that its flags name."""

    path: str
    input_key: str | None
    label_key: str | None


def _source(args: Args, sample: Sample, evaluation: bool) -> _Source | None:
    """Return the file that the sample's row is in; None if no file of the run has the name."""
    name, index = sample.metadata.get("source_name"), sample.metadata.get("source_index")
    if name is None or not isinstance(index, int):
        return None
    sources = list(_sources(args))
    return next((source for known, source in (sources[1:] if evaluation else sources) if known == name), None)


def _sources(args: Args) -> Iterator[tuple[str | None, _Source]]:
    """Yield (name, file) of the training data, then of the evaluation data sets."""
    from slime_core.data.dataset import split_path

    training = args.prompt_data
    name = split_path(training)[0].stem if training else None
    yield name, _Source(training or "", args.input_key, args.label_key)
    for data in args.eval_datasets or ():
        yield data.name, _Source(data.path, data.input_key, data.label_key)


@lru_cache(maxsize=8)
def _rows(path: str) -> Rows:
    from slime_core.data.dataset import open_rows

    return open_rows(path)


# -- special tokens


def _without_special_tokens(checkpoint: str | None, text: str) -> str:
    pattern = _special_tokens(checkpoint or "")
    return pattern.sub("", text) if pattern else text


@lru_cache(maxsize=4)
def _special_tokens(checkpoint: str) -> re.Pattern[str] | None:
    """Return a pattern of the tokenizer's special tokens, which other projects leave out of the text they decode."""
    file = Path(checkpoint) / "tokenizer.json"
    if not checkpoint or not file.is_file():
        return None
    added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens") or ()
    names = sorted((str(token["content"]) for token in added if token.get("special")), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


@hookimpl
def slime_preflight(run: Prepared) -> list[Finding]:
    """Say which rewards are of another project, and what differs there."""
    from slime_core.plugins.resolve import resolve
    from slime_core.protocols.command import Finding, Level

    caller = run.parts.reward
    if caller is None:
        return []
    specs = dict.fromkeys([caller.spec, *(member.spec for member in caller.members)])
    found = ((spec, resolve("rewards", spec).obj) for spec in specs)
    return [
        Finding("reward", Level.NOTE, f"{spec}: called as {reward.form.project} calls it, but {reward.form.differs}")
        for spec, reward in found
        if hasattr(reward, "form")
    ]
