"""`Trainer`: a run of slime as a Python object.

    trainer = Trainer("models/Qwen3-0.6B", data=rows, reward=reward, num_rollout=40)
    trainer.train()                      # as `slime train` does
    for step in trainer: ...             # the same, one rollout at a time

Arguments are checked when the object is made, before a model is loaded. What was given as an object (rows, a model, a
function) is written into files of the run, so that worker processes and a resumed run find it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from slime_runs.run import RunError, is_run

from slime_core.checkpoint.run_dir import run_dir_of
from slime_core.config import Settings
from slime_core.config.spec import flag_specs
from slime_core.errors import ConfigError
from slime_core.files import replace_file
from slime_core.plugins.kinds import KINDS
from slime_python import here
from slime_python.changes import CHANGES, SCHEDULE, check_change
from slime_python.control import Training, plugins_restored, process_restored
from slime_python.display import Display
from slime_python.functions import hook_directory, is_plain, name_of, spec_of
from slime_python.inputs import data_file, model_directory
from slime_python.records import Run
from slime_python.steps import Batch, Step
from slime_python.words import COMPONENTS, in_python, refuse_two_names, without

T = TypeVar("T")
_NAMING = {flag.removeprefix("--").replace("-", "_") for row in KINDS.values() for flag in row.flags}
_NAMING |= {*COMPONENTS.values(), *(name for name in flag_specs() if name.endswith("_path"))}
"""Settings that take a function or object, too."""
_ONLY_TRAINING = ("load", "num_rollout", "num_epoch", "save", "run_dir", "prompt_data", "save_interval")
_EVAL_INTERVAL = 10


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
        loss: Name or class of a loss, or a function as `--custom-loss-function-path` takes it.
        hooks: Hook plugins: objects, classes or modules with functions marked `@slime_core.hookimpl`, or functions that
            have a hook's name.
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
        model: Any = None,
        *positional: Any,
        data: Any = None,
        reward: Any = None,
        eval_data: Any = None,
        tokenizer: Any = None,
        tools: Any = None,
        loss: Any = None,
        hooks: Any = None,
        resume: bool = False,
        push_to_hub: str | None = None,
        **settings: Any,
    ) -> None:
        if positional:
            raise ConfigError(f"Trainer({model!r:.40}, {positional[0]!r:.40}): name it, as in Trainer(model, data=...)")
        named = {"model": model, "data": data, "reward": reward, "eval_data": eval_data, "tools": tools, "loss": loss}
        if push_to_hub is not None:
            from slime_hub.push import check

            check(push_to_hub)
        self._push_to = push_to_hub
        refuse_two_names({**settings, **named})
        if resume and settings.get("save") is None:
            raise ConfigError("argument resume: name the run to resume: Trainer(..., save=DIR, resume=True)")
        self._resume, self._resuming = resume, False
        self._training: Training | None = None
        self._batch: Batch | None = None
        self._updated = False
        """True once the newest batch has been trained on."""
        place, made = _place(settings)
        self._inputs = place / "inputs"
        try:
            given: dict[str, Any] = {**self._named(settings), "save": str(place)}
            given["hf_checkpoint"] = model_directory(model, tokenizer, self._inputs / "model", resume=resume)
            if data is not None:
                given["prompt_data"] = data_file("data", data, self._inputs)
            if eval_data is not None:
                given["eval_prompt_data"] = self._eval_data(eval_data)
                given.setdefault("eval_interval", _EVAL_INTERVAL)
            given |= self._reward(reward, settings) | self._loss(loss)
            if tools is not None:
                many = tools if isinstance(tools, (list, tuple)) else [tools]
                given["tools_path"] = [self._spec("tools", tool) for tool in many]
            if hooks is not None:
                own = hook_directory(hooks, self._inputs / "hooks")
                given["plugin_dir"] = [*given.get("plugin_dir", ()), own]
            self._given = given
            self.settings = self._load()
        except BaseException as error:
            if made:  # an empty directory until this constructor wrote into it
                shutil.rmtree(place)
            in_python(error)
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
        return cls(model, **{**without(given, changes), **changes})

    def to_yaml(self, path: str | Path) -> None:
        """Write what this object was given as a file for `slime train --config`.

        Raises:
            ConfigError: A function cannot be written to a file.
        """
        lost = [here.told(str(value)) for value in self._given.values() if here.told(str(value))]
        if lost:
            raise ConfigError(
                f"to_yaml({str(path)!r}): {', '.join(lost)} cannot be pickled, so no file can hold it; put it into a"
                " module or a file, and name that"
            )
        given = self._given | self.settings.names  # names on the hub with the commits that were used
        replace_file(Path(path).resolve(), yaml.safe_dump(given, sort_keys=False, allow_unicode=True).encode())

    def __setattr__(self, name: str, value: Any) -> None:
        if name in flag_specs():
            raise ConfigError(f"trainer.{name} = ...: type trainer.change({name}={value!r:.40})")
        super().__setattr__(name, value)

    # -- training ---------------------------------------------------------------------------------------------

    def train(self) -> Run:
        """Train to the end, or from the newest commit to the end, and return the run's records.

        Raises:
            SlimeError: What `slime train` would end with.
            KeyboardInterrupt: Ctrl-C; the run has committed what it had trained, and `train` resumes it.
        """
        training = self._begin("train")
        training.on_tick = display = Display(lambda: self.run)
        while training.next() is not None:
            pass
        display.last()
        if self._push_to is not None and self.run.state() == "ended":
            self.push_to_hub(self._push_to)
        return self.run

    def push_to_hub(
        self,
        repo: str,
        *,
        private: bool = False,
        overwrite: bool = False,
        adapters: bool = False,
        adapter: str | None = None,
    ) -> str:
        """Upload the newest committed weights with a card of the run's facts, as `slime push`; return the address.

        Args:
            repo: `org/name`; created if it does not exist.
            private: Create it as a private repository.
            overwrite: Also write to a repository that slime has not made.
            adapters: Upload the adapters of a run with `lora_rank` instead of whole weights.
            adapter: Name of `lora_adapters`; by default the shared adapter.

        Raises:
            ConfigError: Nothing has been committed, or name, token or repository cannot be used.
            SlimeError: The files do not hold the trainer's model.
        """
        from slime_hub.push import push

        form = "peft" if adapters else "merged"
        how: dict[str, Any] = {"adapter": adapter, "form": form, "private": private, "overwrite": overwrite}
        return _on_thread(lambda: push(self.run, repo, **how)).url

    def __iter__(self) -> Iterator[Step]:
        """Train one rollout at a time; a loop that is left ends the run with a commit, and the next one resumes it.

        Raises:
            SlimeError: What `slime train` would end with.
        """
        display = Display(lambda: self.run)
        training = self._begin("steps")
        try:
            while True:
                step = training.next()
                if step is None and self._resuming:
                    training = self._begin("steps")
                    continue
                display.last()
                if step is None:
                    return
                yield step
                if self._resuming:
                    training.end()
        finally:
            training.end()

    def rollout(self) -> Batch:
        """Generate the next batch, and begin or resume the run if none is in progress.

        Raises:
            ConfigError: The last batch was not trained on, or all `num_rollout` rollouts are done.
            SlimeError: What `slime train` would end with.
            KeyboardInterrupt: Ctrl-C; the run has committed what it had trained.
        """
        if self._batch is not None and not self._updated:
            raise ConfigError(f"rollout(): batch {self._batch.number} is not trained on; type trainer.update(batch)")
        if self._training is None or not self._training.alive:
            if self._done() >= (self.settings.args.num_rollout or sys.maxsize):
                raise ConfigError(
                    f"rollout(): all {self.settings.args.num_rollout} rollouts are done; type Trainer(...,"
                    " num_rollout=MORE, save=trainer.run.path, resume=True)"
                )
            self._begin("calls")
        self._batch, self._updated = self._call("rollout()", "rollout"), False
        assert self._batch is not None
        return self._batch

    def update(self, batch: Batch) -> dict[str, float]:
        """Take the optimizer steps of a batch and return their metrics; more than once if called more than once.

        Raises:
            ConfigError: It is not the newest batch.
            SlimeError: What `slime train` would end with.
        """
        if not isinstance(batch, Batch) or self._batch is None or batch.number != self._batch.number:
            newest = f"the newest is {self._batch.number}" if self._batch else "there is none"
            raise ConfigError(f"update({batch!r:.60}): not the newest batch ({newest}); type batch = trainer.rollout()")
        found: dict[str, float] = self._call("update()", "update", batch.data)
        self._updated = True
        return found

    def sync(self) -> dict[str, float]:
        """Make the engine serve the newest weights and return metrics; after the last rollout, end the run.

        Raises:
            ConfigError: No run is in progress.
            SlimeError: What `slime train` would end with.
        """
        found: dict[str, float] = self._call("sync()", "sync")
        if self._updated and self._batch is not None and self._batch.number == self.settings.args.num_rollout:
            self.close()
        return found

    def change(self, **settings: Any) -> None:
        """Change settings from the next rollout on (`CHANGES` has those that may change).

        A run in this process takes them at once; another ends with a commit and resumes with them.

        Raises:
            ConfigError: A setting may not change, or its value is wrong; nothing has changed.
        """
        check_change(settings, self.settings.args.plugins or {})
        before, kept = self.settings, dict(self._given)
        self._given |= settings
        try:
            after = self._load()
        except BaseException:
            self._given = kept
            raise
        values = {n: getattr(after.args, n) for n in CHANGES if getattr(after.args, n) != getattr(before.args, n)}
        alive = self._training is not None and self._training.alive
        if alive and self._call("change()", "change", values):
            for name, value in values.items():
                setattr(before.args, name, value)
            return
        if values.keys() & SCHEDULE:  # a commit has the schedule with which it was made
            self._given["override_opt_param_scheduler"] = True
        if not alive:
            self.settings = after
            return
        self._resuming = True
        if self._training is not None and self._training.mode == "calls":
            self.close()

    def close(self) -> None:
        """End the run in progress with a commit, with its processes and memory; the object stays usable.

        Raises:
            SlimeError: What `slime train` would end with.
        """
        training, self._training, self._batch = self._training, None, None
        if training is not None:
            training.end()

    def __enter__(self) -> Trainer:
        """Return the object; the end of the block closes it."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self, mode: str) -> Training:
        from slime_core.launch.launchers import settle_launcher
        from slime_core.launch.ranks import processes_of
        from slime_core.plugins.resolve import resolve

        if self._training is not None and self._training.alive:
            doing = {"steps": "leave `for step in trainer`", "calls": "type trainer.close()"}.get(
                self._training.mode, "wait for its end"
            )
            raise ConfigError(f"this Trainer is training already; {doing} first")
        settings = self.settings = self._load()
        self._resume, self._resuming, self._batch = True, False, None  # from now on the commits there are this object's
        with plugins_restored():  # the hooks of this object are no plugins of the next
            settle_launcher(settings)
            trainer = resolve("trainers", settings.args.train_backend, origin=settings.cite("train_backend")).obj
            ranks = settings.args.launcher == "inline" and processes_of(settings, trainer) > 1
        self._training = Training(settings, mode, alone=ranks and mode != "train")
        return self._training

    def _call(self, said: str, verb: str, value: Any = None) -> Any:
        """Return the answer of the run's loop. Raises ConfigError if no run is in progress that takes this call."""
        training = self._training
        if training is None or not training.alive:
            raise ConfigError(f"{said}: no run is in progress; type batch = trainer.rollout()")
        if training.mode != "calls" and verb not in ("change", "commit"):
            raise ConfigError(f"{said}: inside `for step in trainer`, which does this itself; leave that loop first")
        found = training.call(verb, value)
        if not training.alive:
            raise ConfigError(f"{said}: the run has ended")
        return found

    def _done(self) -> int:
        """Return the number of committed rollouts."""
        commits = sorted((Path(str(self.settings.args.save)) / "checkpoints").glob("rollout_*"))
        return int(commits[-1].name.rpartition("_")[2]) + 1 if commits and self._resume else 0

    @property
    def run(self) -> Run:
        """The records of the run. Raises RunError before it has begun."""
        if not is_run(place := Path(run_dir_of(self.settings.args))):
            raise RunError(f"trainer.run: no run in {place} yet; type trainer.train()")
        return Run(place)

    @property
    def model(self) -> Path:
        """Directory of the newest weights: of the last commit, else of the model that was given."""
        commits = sorted((Path(str(self.settings.args.save)) / "checkpoints").glob("rollout_*"))
        return commits[-1] if commits else Path(str(self.settings.args.hf_checkpoint))

    # -- the model as it is -----------------------------------------------------------------------------------

    def _newest(self) -> Path:
        """Return the directory of the weights as they are now; a run in progress commits them first."""
        if self._training is not None and self._training.alive:
            self._call("commit", "commit")
        return self.model

    def save(self, path: str | Path) -> Path:
        """Copy the newest weights, with tokenizer and configuration, into a new directory.

        Raises:
            ConfigError: The directory exists, or nothing has been trained.
        """
        from slime_runs.save_hf import export_hf

        if Path(path).exists():
            raise ConfigError(f"save({str(path)!r}): the directory exists; name a new one")
        newest = self._newest()
        if newest == Path(str(self.settings.args.hf_checkpoint)):
            raise ConfigError(f"save({str(path)!r}): nothing has been committed yet; train first")
        export_hf(newest, Path(path))
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
        given |= {"hf_checkpoint": str(self._newest()), "run_dir": str(records), **settings}
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
        model = self._newest()
        return _on_thread(lambda: asyncio.run(_generate(self.settings, model, list(prompts), sampling)))

    # -- arguments --------------------------------------------------------------------------------------------

    def _load(self) -> Settings:
        """Check everything that was given, with the commit to resume from."""
        from slime_core.plugins.presets import load_settings

        given = dict(self._given)
        if self._resume and is_run(Path(given["save"])):  # also before the first commit: then it starts again
            given["load"] = given["save"]
        with plugins_restored():
            return load_settings([], command="train", arguments=given)

    def _named(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings by their names, with a spec in place of a function or object."""
        found = {}
        for name, value in settings.items():
            setting = COMPONENTS.get(name, name)
            if name in COMPONENTS or (setting in _NAMING and not is_plain(value)):
                value = self._spec(name, value)
            elif callable(value):
                raise ConfigError(
                    f"argument {name} {value!r:.60}: takes a value, no function; functions are taken by reward, tools,"
                    f" loss, hooks, {', '.join(COMPONENTS)}"
                )
            found[setting] = value
        return found

    def _spec(self, kind: str, given: Any) -> str:
        return spec_of(kind, given, self._inputs / "functions")

    def _reward(self, reward: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that name the reward; several become the terms of `weighted_sum`."""
        if reward is None:
            return {}
        if not isinstance(reward, (list, tuple)):
            return {"custom_rm_path": self._spec("reward", reward)}
        pairs = [term if isinstance(term, tuple) else (term, 1.0) for term in reward]
        wrong = [term for term in pairs if len(term) != 2 or not isinstance(term[1], (int, float))]
        if wrong or not pairs:
            raise ConfigError(f"argument reward {wrong[:1] or reward!r}: type [REWARD, ...] or [(REWARD, WEIGHT), ...]")
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
        if not inspect.isroutine(loss) and hasattr(loss, "bind"):
            return {"loss_type": self._spec("loss", loss)}
        return {"loss_type": "custom_loss", "custom_loss_function_path": self._spec("loss", loss)}

    def _eval_data(self, data: Any) -> list[str]:
        """Return `--eval-prompt-data`'s names and paths."""
        sets = data if isinstance(data, Mapping) else {"eval": data}
        return [
            word
            for name, rows in sets.items()
            for word in (str(name), data_file(f"eval_data {name}", rows, self._inputs))
        ]


def _place(settings: Mapping[str, Any]) -> tuple[Path, bool]:
    """Return the directory of the run, and whether it was made just now: a new one unless `save` names it."""
    if settings.get("save") is not None:
        place = Path(str(settings["save"]))
        if place.exists() and not place.is_dir():
            raise ConfigError(f"argument save {str(place)!r}: a file; name a directory")
        return place, False
    place = _fresh(Path("outputs") / "python")
    return place, True


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
