"""`Trainer`: a run of slime as a Python object.

    trainer = Trainer("models/Qwen3-0.6B", data=rows, reward=reward, num_rollout=40)
    trainer.train()                      # as `slime train` does
    for step in trainer: ...             # the same, one rollout at a time

Arguments are checked when the object is made, before a model is loaded. What was given as an object (rows, a model, a
function) is written into files of the run, so that worker processes and a resumed run find it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from slime_runs.run import Run as RunRecords

from slime_core.config import Settings
from slime_core.errors import ConfigError
from slime_core.observability.run_dir import run_dir_of
from slime_python.control import Step, Training, process_restored
from slime_python.functions import name_of, spec_of
from slime_python.inputs import data_file, model_directory

T = TypeVar("T")
COMPONENTS = {
    "generate": "custom_generate_function_path",
    "environment": "environment_path",
    "dynamic_filter": "dynamic_sampling_filter_path",
    "buffer_filter": "buffer_filter_path",
    "estimator": "advantage_estimator",
    "rollout": "rollout_function_path",
    "sample_hook": "rollout_sample_hook_path",
}
"""Argument of a function or object -> the setting that names it."""
_ONLY_TRAINING = ("load", "num_rollout", "num_epoch", "save", "run_dir", "prompt_data", "save_interval")
_EVAL_INTERVAL = 10


class Run(RunRecords):
    """The records of a run: metrics, samples, checkpoints, as `slime show` reads them."""

    def frame(self) -> Any:
        """Return the metrics as a pandas DataFrame, one row per step. Raises ImportError without pandas."""
        import pandas

        return pandas.DataFrame(self.metrics()).set_index("step")

    @property
    def checkpoint(self) -> Path | None:
        """The newest commit; None before the first."""
        commits = sorted(self.checkpoints.glob("rollout_*"))
        return commits[-1] if commits else None

    def _repr_html_(self) -> str:
        """Return a table of the last steps, for notebooks."""
        names = ("rollout/raw_reward", "rollout/response_len/mean", "train/loss")
        steps = [line for line in self.metrics() if line["step"] > 0][-10:]
        head = "".join(f"<th>{name}</th>" for name in ("step", *names))
        rows = "".join(
            f"<tr><td>{line['step']}</td>" + "".join(f"<td>{line.get(name, ''):.4}</td>" for name in names) + "</tr>"
            for line in steps
            if all(name in line for name in names)
        )
        return f"<b>{self.name}</b>: {self.state()}<table><tr>{head}</tr>{rows}</table>"


class Trainer:
    """Train a model by reinforcement learning, from Python.

    Args:
        model: Directory in Hugging Face layout, `org/name[@revision]` of the hub, or a transformers model (with
            `tokenizer`).
        data: Prompts and labels: a path, `hf:org/name[split]` of the hub, a list of dicts, a pandas DataFrame, a
            `datasets.Dataset`, or any iterable of rows, which is read to its end. Columns are recognised as those of
            files are.
        reward: A name, a path, a function or an object; a list of them, or of (reward, weight) pairs, is summed.
        eval_data: As `data`, or a mapping of names to it; evaluated before training, every 10 rollouts and at the end,
            unless `eval_interval` says otherwise.
        tokenizer: Of a model that is an object.
        tools: Functions that the model may call, as `--tools-path` takes them.
        loss: Name of a loss, or a function as `--custom-loss-function-path` takes it.
        resume: Go on from the newest commit in `save`.
        push_to_hub: Repository of the Hugging Face hub, `org/name`, that `train` uploads the model to when the run has
            ended, as `slime push` does; the token is HF_TOKEN of the environment.
        settings: Any setting of `slime train` by its name; and the arguments of `COMPONENTS`, each a name, a path, a
            function, a class or an object.

    Raises:
        ConfigError: A setting is unknown, wrong or missing, or an argument is of the wrong type.
        PluginError: A component cannot be found or loaded.

    Example:
        >>> def reward(args, sample):
        ...     return float(sample.label in sample.response)
        >>> trainer = Trainer("models/small", data=[{"input": "2+2=", "label": "4"}], reward=reward, num_rollout=20)
        >>> for step in trainer:
        ...     print(step.number, step.reward)
    """

    def __init__(
        self,
        model: Any,
        *,
        data: Any = None,
        reward: Any = None,
        eval_data: Any = None,
        tokenizer: Any = None,
        tools: Any = None,
        loss: Any = None,
        resume: bool = False,
        push_to_hub: str | None = None,
        **settings: Any,
    ) -> None:
        if push_to_hub is not None:
            from slime_hub.push import check

            check(push_to_hub)
        self._push_to = push_to_hub
        components = {name: settings.pop(name) for name in COMPONENTS if name in settings}
        self._resume = resume
        place, made = _place(settings)
        self._inputs = place / "inputs"
        try:
            given: dict[str, Any] = {**settings, "save": str(place)}
            given["hf_checkpoint"] = model_directory(model, tokenizer, self._inputs / "model", resume=resume)
            if data is not None:
                given["prompt_data"] = data_file("data", data, self._inputs)
            if eval_data is not None:
                given["eval_prompt_data"] = self._eval_data(eval_data)
                given.setdefault("eval_interval", _EVAL_INTERVAL)
            given |= self._reward(reward, settings) | self._loss(loss)
            given |= {COMPONENTS[name]: self._spec(name, value) for name, value in components.items()}
            if tools is not None:
                many = tools if isinstance(tools, (list, tuple)) else [tools]
                given["tools_path"] = [self._spec("tool", tool) for tool in many]
            self._given = given
            self.settings = self._load()
        except BaseException:
            if made:  # an empty directory until this constructor wrote into it
                shutil.rmtree(place)
            raise

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: Any) -> Trainer:
        """Make a Trainer of a file that `to_yaml` or a person wrote; `changes` replace what it says.

        Raises:
            ConfigError: The file cannot be read, or says something wrong.
        """
        from slime_core.config.yaml_file import read_yaml

        items = read_yaml(str(path), f"Trainer.from_yaml({str(path)!r})")
        given = {key.replace("-", "_"): item.value for key, item in items.items()}
        model = changes.pop("model", given.pop("hf_checkpoint", None))
        if model is None:
            raise ConfigError(f"{path}: no hf_checkpoint; add it, or type Trainer.from_yaml(path, model=...)")
        return cls(model, **{**given, **changes})

    def to_yaml(self, path: str | Path) -> None:
        """Write what this object was given as a file for `slime train --config`.

        Raises:
            ConfigError: A function cannot be written to a file.
        """
        lost = [name for name, value in self._given.items() if "slime_python.here:" in str(value)]
        if lost:
            raise ConfigError(
                f"to_yaml: {', '.join(lost)} was given as an object that cannot be pickled; put it into a module or a"
                " file, and name that"
            )
        given = self._given | self.settings.names  # names on the hub with the commits that were used
        Path(path).write_text(yaml.safe_dump(given, sort_keys=False, allow_unicode=True), encoding="utf-8")

    # -- training ---------------------------------------------------------------------------------------------

    def train(self) -> Run:
        """Train to the end, or from the newest commit to the end, and return the run's records.

        Raises:
            SlimeError: What `slime train` would end with.
            KeyboardInterrupt: Ctrl-C; the run has committed what it had trained, and `train` resumes it.
        """
        training = self._start(stepwise=False)
        while training.next() is not None:
            pass
        if self._push_to is not None and self.run.state() == "ended":
            self.push_to_hub(self._push_to)
        return self.run

    def push_to_hub(self, repo: str, *, private: bool = False, overwrite: bool = False, adapters: bool = False) -> str:
        """Upload the newest committed weights with a card of the run's facts, as `slime push`; return the address.

        Args:
            repo: `org/name`; created if it does not exist.
            private: Create it as a private repository.
            overwrite: Also write to a repository that slime has not made.
            adapters: Upload the adapters of a run with `lora_rank` instead of whole weights.

        Raises:
            ConfigError: Nothing has been committed, or name, token or repository cannot be used.
            SlimeError: The files do not hold the trainer's model.
        """
        from slime_hub.push import push

        form = "peft" if adapters else "merged"
        return _on_thread(lambda: push(self.run, repo, form=form, private=private, overwrite=overwrite)).url

    def __iter__(self) -> Iterator[Step]:
        """Train one rollout at a time; a loop that is left ends the run with a commit, and the next one resumes it.

        Raises:
            ConfigError: Several trainer processes: they are another process's, so `train` is the way.
            SlimeError: What `slime train` would end with.
        """
        training = self._start(stepwise=True)
        try:
            while (step := training.next()) is not None:
                yield step
        finally:
            training.end()

    def _start(self, *, stepwise: bool) -> Training:
        from slime_core import launch

        settings = self.settings = self._load()
        self._resume = True  # from now on the commits there are this object's
        if stepwise:
            _refuse_other_processes(settings)
        return Training(lambda: launch.run(settings), stepwise=stepwise)

    @property
    def run(self) -> Run:
        """The records of the run. Raises RunError before it has begun."""
        return Run(run_dir_of(self.settings.args))

    @property
    def model(self) -> Path:
        """Directory of the newest weights: of the last commit, else of the model that was given."""
        commits = sorted((Path(str(self.settings.args.save)) / "checkpoints").glob("rollout_*"))
        return commits[-1] if commits else Path(str(self.settings.args.hf_checkpoint))

    # -- the model as it is -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Copy the newest committed weights, with tokenizer and configuration, into a new directory.

        Raises:
            ConfigError: The directory exists, or nothing has been committed.
        """
        from slime_core.checkpoint.export import export_hf

        if Path(path).exists():
            raise ConfigError(f"save({str(path)!r}): the directory exists; name a new one")
        if self.model == Path(str(self.settings.args.hf_checkpoint)):
            raise ConfigError(f"save({str(path)!r}): nothing has been committed yet; train first")
        export_hf(self.model, Path(path))
        return Path(path)

    def evaluate(self, data: Any = None, **settings: Any) -> dict[str, Any]:
        """Score the newest weights, and return the report of `slime eval`: metrics, intervals, data sets.

        Args:
            data: As `eval_data`; by default that.
            settings: Settings of `slime eval` that replace the trainer's.

        Raises:
            ConfigError: There is no evaluation data, or a setting is wrong.
        """
        from slime_commands.eval.evaluation import evaluate

        from slime_core.config import load_settings
        from slime_core.launch.prepare import prepare

        given = {name: value for name, value in self._given.items() if name not in _ONLY_TRAINING}
        place = self._inputs.parent
        records = _fresh(place.with_name(f"{place.name}-evaluation"))
        given |= {"hf_checkpoint": str(self.model), "run_dir": str(records), **settings}
        if data is not None:
            given["eval_prompt_data"] = self._eval_data(data)
        if not given.get("eval_prompt_data"):
            raise ConfigError("evaluate(): no data; type evaluate(data), or give the Trainer eval_data")
        loaded = load_settings([], command="eval", arguments=given)
        return _on_thread(lambda: evaluate(prepare(loaded, learn=False)))

    def generate(self, prompts: Sequence[Any], **sampling: Any) -> list[str]:
        """Return one response per prompt by the newest weights; `sampling` has SGLang's keys (`temperature`, ...).

        Args:
            prompts: Texts or lists of chat messages; text becomes one user message with `apply_chat_template`.
            sampling: Sampling parameters; by default those of the rollouts.

        Raises:
            EngineError: A parameter is unknown, or the engine failed.
        """
        if isinstance(prompts, str):
            raise ConfigError("generate(): expected a list of prompts; type generate([prompt])")
        return _on_thread(lambda: asyncio.run(_generate(self.settings, self.model, list(prompts), sampling)))

    # -- arguments --------------------------------------------------------------------------------------------

    def _load(self) -> Settings:
        """Check everything that was given, with the commit to resume from."""
        from slime_core.plugins.presets import load_settings

        given = dict(self._given)
        has_commits = any((Path(given["save"]) / "checkpoints").glob("rollout_*"))
        if has_commits and self._resume:
            given["load"] = given["save"]
        return load_settings([], command="train", arguments=given)

    def _spec(self, kind: str, given: Any) -> str:
        return spec_of(kind, given, self._inputs / "functions")

    def _reward(self, reward: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that name the reward; several become the terms of `weighted_sum`."""
        if reward is None:
            return {}
        if not isinstance(reward, (list, tuple)):
            return {"custom_rm_path": self._spec("reward", reward)}
        pairs = [term if isinstance(term, tuple) else (term, 1.0) for term in reward]
        terms = [{"reward": self._spec("reward", one), "weight": float(weight)} for one, weight in pairs]
        for (one, _), term in zip(pairs, terms):
            term["name"] = one if isinstance(one, str) else name_of(one)
        plugins = dict(settings.get("plugins") or {})
        return {
            "custom_rm_path": "weighted_sum",
            "reward_key": "score",
            "plugins": {**plugins, "weighted_sum": {"terms": terms}},
        }

    def _loss(self, loss: Any) -> dict[str, Any]:
        if loss is None or isinstance(loss, str):
            return {} if loss is None else {"loss_type": loss}
        return {"loss_type": "custom_loss", "custom_loss_function_path": self._spec("loss", loss)}

    def _eval_data(self, data: Any) -> list[str]:
        """Return `--eval-prompt-data`'s names and paths."""
        sets = data if isinstance(data, Mapping) else {"eval": data}
        return [word for name, rows in sets.items() for word in (name, data_file(name, rows, self._inputs))]


def _place(settings: Mapping[str, Any]) -> tuple[Path, bool]:
    """Return the directory of the run, and whether it was made just now: a new one unless `save` names it."""
    if settings.get("save") is not None:
        return Path(str(settings["save"])), False
    place = _fresh(Path("outputs") / "python")
    return place, True


def _refuse_other_processes(settings: Settings) -> None:
    """Raise ConfigError if the run trains in processes that this one starts."""
    from slime_core.launch.ranks import processes_of
    from slime_core.plugins.resolve import resolve

    trainer = resolve("trainers", settings.args.train_backend, origin=settings.cite("train_backend")).obj
    if (number := processes_of(settings, trainer)) > 1 or settings.args.launcher not in ("auto", "inline"):
        raise ConfigError(
            f"for step in trainer: the run trains in {number} process(es) of its own (--launcher"
            f" {settings.args.launcher}); use trainer.train()"
        )


def _fresh(base: Path) -> Path:
    """Make and return the first directory of `base-1`, `base-2`, ... that does not exist."""
    base.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        place = base.with_name(f"{base.name}-{number}")
        with suppress(FileExistsError):
            os.mkdir(place)
            return place
        number += 1


def _on_thread(work: Callable[[], T]) -> T:
    """Return what `work` returns on a thread of its own, since this one may be turning an event loop."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with process_restored():
                found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="slime-work", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if failed:
        raise failed[0]
    return found[0]


async def _generate(settings: Settings, model: Path, prompts: list[Any], sampling: Mapping[str, Any]) -> list[str]:
    from slime_core.data.tokenizer import encode_prompt, load_tokenizer
    from slime_core.plugins.resolve import resolve
    from slime_core.plugins.signatures import construct

    args = settings.args.model_copy(update={"hf_checkpoint": str(model)})
    defaults = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
    }
    tokenizer = load_tokenizer(model)
    engine = construct(resolve("engines", args.rollout_engine, origin="generate()").obj, args)
    await engine.start()
    try:
        calls = [engine.generate(encode_prompt(tokenizer, one, args), {**defaults, **sampling}) for one in prompts]
        outputs = await asyncio.gather(*calls)
    finally:
        await engine.stop()
    return [str(output.text) for output in outputs]
