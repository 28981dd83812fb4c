"""Model and data of a run -> a model, data and functions that are on this machine.

A large model becomes a small one of the same architecture. With `--stand-ins`, made-up rows take the place of data that
are elsewhere, and functions whose files are elsewhere are left out.
"""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime_commands.check.check import made_elsewhere
from slime_commands.check.config import named_components
from slime_commands.check.preflight import num_elements
from slime_commands.models.presets import ModelPreset, find_preset, model_presets
from slime_commands.rehearse.report import Report
from slime_commands.rehearse.scaled import MODELS, Here, Options, RunFile, settings_here, with_model
from slime_commands.rehearse.small_model import shrink, write_small_model
from slime_core.checkpoint.sources import required_source
from slime_core.config import Settings
from slime_core.config.sections.evaluation import EvalDataset
from slime_core.config.yaml_file import rebase
from slime_core.data.dataset import split_path
from slime_core.errors import ConfigError, SlimeError
from slime_core.launch.components import Resolver
from slime_core.launch.prepare import prepare
from slime_core.models.config import read_hf_config
from slime_core.models.hf_io import weight_files
from slime_core.plugins.presets import load_settings

_SMALL = 20e6
"""Parameters of a model that is rehearsed as it is."""
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
"""Entries of config.json that a reference has as the trained model."""
_ROWS = 64
"""Rows that stand in for a data set."""
_MADE = ("hf_checkpoint", "prompt_data", "eval_prompt_data", "prepare_path")
"""Settings by whose origins a run decides whether the recipe may make an input."""
_REWARD = "math"
"""Reward that takes the place of a function or server that is not on this machine."""
_OF_SERVICE = (
    "rm_url", "custom_rm_path", "custom_reward_post_process_path", "group_rm", "reward_key", "eval_reward_key",
)  # fmt: skip
"""Settings of a reward that asks a server."""
_CONNECT_S = 2.0


def leave_out_unfound(settings: Settings, resolver: Resolver, report: Report) -> None:
    """Leave out functions whose files are not on this machine. Raises SlimeError for other components."""
    for kind, spec, flag in list(named_components(settings)):
        name = flag.removeprefix("--").replace("-", "_")
        try:
            resolver.spec(kind, spec, flag)
        except SlimeError as error:
            if not isinstance(getattr(settings.args, name), str) or not settings.is_given(name):
                raise
            report.gaps.append(str(error).splitlines()[0])
            settings.derive(name, None, "--stand-ins")
            for dataset in settings.args.eval_datasets:
                if getattr(dataset, name, None) == spec:
                    setattr(dataset, name, None)


def model_config(settings: Settings, report: Report) -> dict[str, Any] | None:
    """Return the model's config.json, or that of a preset if the model is not here; None if a recipe makes the model.

    Raises:
        ConfigError: The model is not here, and no preset has its name.
    """
    args = settings.args
    directory = Path(args.hf_checkpoint or "")
    if (directory / "config.json").is_file():
        return read_hf_config(directory)
    if args.prepare_path:
        return None
    known = {end.lower(): p for p in model_presets().values() for end in (p.name, p.hub.split("/")[-1])}
    preset = find_preset(args.model) if args.model else known.get(directory.name.lower())
    alike = [preset for preset in model_presets().values() if _has_given_numbers(settings, preset)]
    preset = preset or max(alike, key=lambda p: _likeness(p.name, directory.name), default=None)
    cited = settings.cite("hf_checkpoint")
    if preset is None:
        raise ConfigError(f"{cited}: no model here, and no preset of its name; type --model NAME (slime models list)")
    report.gaps.append(f"{cited}: not on this machine; numbers of the preset {preset.name}, and a tokenizer")
    if not args.model:
        settings.derive("model", preset.name, "hf_checkpoint")
    return dict(preset.config)


def _has_given_numbers(settings: Settings, preset: ModelPreset) -> bool:
    """Return whether the flags state the preset's numbers."""
    n = preset.numbers
    stated: dict[str, float] = {
        "num_layers": n.layers, "hidden_size": n.hidden_size, "num_attention_heads": n.heads,
        "vocab_size": n.vocab_size, "rotary_base": n.rope_base,
    }  # fmt: skip
    given = {name: number for name, number in stated.items() if name in settings.foreign}
    return "num_layers" in given and all(getattr(settings.args, name) == x for name, x in given.items())


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


@dataclass
class Inputs:
    """Model and data of a rehearsal, all written to its folder."""

    argv: list[str]
    settings: Settings
    """Settings of the run; replaced if a recipe makes inputs in the folder."""
    trainer: Any
    engine: Any
    options: Options
    folder: Path
    report: Report

    def here(self, config: dict[str, Any] | None) -> Here:
        """Return values with a model, data and engine that are here.

        Raises:
            ConfigError: The model cannot be built, or the recipe may not make an input.
            CheckpointError: A further model is not on this machine, though the run's own is.
        """
        if flags := made_elsewhere(self.settings, self.folder):
            config = self._made(flags)
        assert config is not None, "a recipe has made the model"
        here = settings_here(self.settings, self.trainer, self.engine, self.options.processes)
        directory = Path(self.settings.args.hf_checkpoint)
        there = (directory / "config.json").is_file()
        model = self._model(here, directory, there, config)
        for name in MODELS:
            path = getattr(self.settings.args, name)
            if path and self.settings.is_given(name):
                self._further_model(name, path, config if there else None)
        with_model(here, model, small=model != directory)
        if self.options.stand_ins:
            self._stand_ins(here)
        self.report.gaps += here.gaps
        return here

    def _made(self, flags: list[str]) -> dict[str, Any]:
        """Let the recipe make inputs in the folder, as far as the run would; return the model's config.json."""
        origins = {name: self.settings.origins[name] for name in _MADE}
        self.settings = load_settings([*self.argv, *flags], command=self.options.command, fetch=False)
        self.settings.origins |= origins
        args = self.settings.args
        values = settings_here(self.settings, self.trainer, self.engine, self.options.processes).values
        values = {**values, "prepare_path": args.prepare_path, "save": str(self.folder / "made")}
        settings = RunFile.write(self.folder / "made.yaml", values, self.options.command).load()
        settings.origins |= origins
        args.hf_checkpoint = prepare(settings).args.hf_checkpoint
        return read_hf_config(args.hf_checkpoint)

    def _model(self, here: Here, directory: Path, there: bool, config: dict[str, Any]) -> Path:
        """Return the directory of the rehearsal's model, written if the run's own is large or absent."""
        has_weights = there and any(directory.glob("*.safetensors*"))
        parameters = sum(map(num_elements, weight_files(directory))) if has_weights else 0
        if 0 < parameters <= _SMALL:
            self.report.done.append(("model", f"{directory.name}, {parameters:,} parameters, as it is"))
            return directory
        model = self.folder / "model"
        small = shrink(config, stages=here.stages)
        count = write_small_model(directory if there else None, model, small, self.settings.args.seed)
        text = f"{config['model_type']}, {count:,} random parameters, {_layers(small)} layers"
        self.report.done.append(("model", text))
        self.report.gaps.append("the checkpoint's weights: the rehearsal's are random")
        if not there:
            here.values.pop("rollout_stop_token_ids", None)
        return model

    def _further_model(self, name: str, path: str, config: Mapping[str, Any] | None) -> None:
        """Note a reference, teacher or critic.

        Args:
            config: The run's own config.json; None if that model is not on this machine.

        Raises:
            CheckpointError: This model alone is not on this machine.
            ConfigError: It is a reference of another size.
        """
        cited = self.settings.cite(name)
        if config is not None and not self.options.stand_ins:
            folder = "critic" if name == "critic_load" else None
            other = read_hf_config(required_source(path, None, cite=cited, folder=folder).directory)
            differs = [size for size in _SIZES if name == "ref_load" and other.get(size) != config.get(size)]
            if differs:
                sizes = ", ".join(f"{size} {other.get(size)} instead of {config.get(size)}" for size in differs)
                raise ConfigError(f"{cited}: the reference is another model than the trained one: {sizes}")
        self.report.gaps.append(f"{cited}: the rehearsal's model takes its place")

    def _stand_ins(self, here: Here) -> None:
        """Write rows where the data are not on this machine."""
        args, values, gaps = self.settings.args, here.values, self.report.gaps
        learns = args.compute_advantages_and_returns and self.engine is not None
        elsewhere = args.prompt_data is not None and not split_path(args.prompt_data)[0].exists()
        if learns and elsewhere and args.input_key and not args.label_key:
            gaps.append("no --label-key: rows that stand in have labels; rewards that compare with a label need it")
            values["label_key"] = args.label_key = "label"
        if args.rm_url and not _answers(args.rm_url):
            self._service_elsewhere(here)
        elif learns and not args.rm_type and not args.custom_rm_path:
            gaps.append(f"the reward: not on this machine; the reward {_REWARD} takes its place")
            values["rm_type"] = _REWARD
            for name in ("reward_key", "eval_reward_key"):
                values.pop(name, None)
        if elsewhere:
            gaps.append(f"{self.settings.cite('prompt_data')}: not on this machine; rows that stand in")
            values["prompt_data"] = str(self._rows("prompt_data", args))
        if args.eval_config and not os.path.exists(args.eval_config):
            gaps.append(f"{self.settings.cite('eval_config')}: not on this machine; a data set like --prompt-data's")
            del values["eval_config"]
            columns = {name: getattr(args, name) for name in ("input_key", "label_key", "apply_chat_template")}
            args.eval_datasets = [EvalDataset(name="stand_in", path=str(args.eval_config), **columns)]
        for dataset in args.eval_datasets:
            if not split_path(dataset.path)[0].exists():
                gaps.append(f"evaluation data set {dataset.name!r} {dataset.path}: rows that stand in")
                dataset.path = str(self._rows(dataset.name, dataset))
        if args.eval_datasets:
            folder = os.getcwd()  # the rehearsal's run file is in another directory
            values |= {"eval_prompt_data": [x for d in args.eval_datasets for x in (d.name, rebase(folder, d.path))]}
        path = values.get("megatron_config_path")
        if path and not os.path.exists(path):
            gaps.append(f"--megatron-config-path {path}: not on this machine")
            del values["megatron_config_path"]

    def _service_elsewhere(self, here: Here) -> None:
        """Replace the reward that asks --rm-url, and the teacher behind it."""
        args, values = self.settings.args, here.values
        teacher = args.use_opd and args.opd_type == "sglang"
        own = " and the rehearsal's model as --opd-type local" if teacher else ""
        cited = self.settings.cite("rm_url")
        self.report.gaps.append(f"{cited}: does not answer this machine; the reward {_REWARD}{own} take its place")
        for name in _OF_SERVICE:
            values.pop(name, None)
        values["rm_type"] = _REWARD
        for dataset in args.eval_datasets:
            dataset.rm_type, dataset.custom_rm_path = _REWARD, None
        if teacher:
            values |= {"opd_type": "local", "opd_teacher_load": values["hf_checkpoint"]}
            values["plugins"].pop("on_policy_distillation", None)

    def _rows(self, name: str, columns: Any) -> Path:
        """Write rows of sums with the columns that the settings name; return the path."""
        supervised = not self.settings.args.compute_advantages_and_returns
        rng, rows = random.Random(0), []
        for _ in range(_ROWS):
            a, b = rng.randint(10, 99), rng.randint(10, 99) + 100 * (name != "prompt_data")  # none is in both
            question, answer = f"{a}+{b}=?", str(a + b)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            row: dict[str, Any] = {columns.input_key or "input": messages if supervised else question}
            if columns.label_key or not columns.input_key:  # without --input-key, columns are recognised
                row[columns.label_key or "label"] = answer
            rows.append(row)
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path


def _answers(url: str) -> bool:
    """Return whether a connection to the server can be opened."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), _CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _layers(config: Mapping[str, Any]) -> Any:
    text = config.get("text_config", config)
    return text.get("num_hidden_layers") or text.get("n_layer") or "?"
