"""Bugs of the zoo planted into TRL's GRPOTrainer, on the CPU: what does it say of them within five steps?

    .venv/bin/python tests/zoo/on_trl.py --trl-python /tmp/trl-venv/bin/python

Writes `trl.json`, from which the reference page `silent-bugs.md` is built. A bug is said when the run logs a warning or
raises an error which the sound run does not, or logs a metric that names it (`_named`); other numbers say nothing.
TRL's environment: benchmarks/README.md, `end_to_end.py`. Without an engine of its own TRL has no weights to send.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, GROUP, RATE = 5, 4, 1e-3


def _output(change: Callable[[dict[str, Any]], object]) -> Callable[[Any], None]:
    """Of what a rollout hands to the loss."""

    def plant(trainer: Any) -> None:
        made = trainer._generate_and_score_completions

        def changed(inputs: Any) -> Any:
            output = made(inputs)
            change(output)
            return output

        trainer._generate_and_score_completions = changed

    return plant


def _set(**values: Any) -> Callable[[Any], None]:
    def plant(trainer: Any) -> None:
        for name, value in values.items():
            setattr(trainer, name, value)

    return plant


def _mask(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def of(output: dict[str, Any]) -> None:
        output["completion_mask"] = change(output["completion_mask"])

    return _output(of)


def _advantages(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def of(output: dict[str, Any]) -> None:
        output["advantages"] = change(output["advantages"])

    return _output(of)


def _late(mask: Any) -> Any:
    import torch

    return torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1)


def _early(mask: Any) -> Any:
    import torch

    return torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)


def _dropout(trainer: Any) -> None:
    from torch.nn.functional import dropout

    trainer.model.model.norm.register_forward_hook(lambda module, _, states: dropout(states, 0.3, module.training))


def _gradients(trainer: Any) -> None:
    made = trainer.accelerator.backward
    trainer.accelerator.backward = lambda loss, **kwargs: made(loss / 4, **kwargs)


def _loss(trainer: Any) -> None:
    made = trainer._compute_loss
    trainer._compute_loss = lambda *args, **kwargs: -made(*args, **kwargs)


def _untempered(trainer: Any) -> None:
    trainer.generation_config.temperature = 0.5  # the log-probs are of 1


def _after_steps(change: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any], None]:
    def plant(trainer: Any) -> None:
        from transformers import TrainerCallback

        first = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

        class After(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                change(trainer, first)

        trainer.add_callback(After())

    return plant


def _back(*parts: str) -> Callable[[Any], None]:
    def change(trainer: Any, first: dict[str, Any]) -> None:
        for name, p in trainer.model.named_parameters():
            if not parts or any(part in name for part in parts):
                p.data.copy_(first[name])

    return _after_steps(change)


def _reference_follows(trainer: Any, _: dict[str, Any]) -> None:
    trainer.ref_model.load_state_dict(trainer.model.state_dict())


def _rate(trainer: Any) -> None:
    from transformers import TrainerCallback

    class Scaled(TrainerCallback):
        def on_train_begin(self, *_: Any, lr_scheduler: Any = None, **__: Any) -> None:
            lr_scheduler.base_lrs = [8 * rate for rate in lr_scheduler.base_lrs]

    trainer.add_callback(Scaled())


BUGS: dict[str, tuple[Callable[[Any], None] | None, dict[str, Any]]] = {
    "sound": (None, {}),
    "sound, KL": (None, {"beta": 0.1}),
    "advantage_sign": (_advantages(lambda a: -a), {}),
    "rewards_stay_behind": (_advantages(lambda a: a.roll(1, 0)), {}),
    "advantages_broadcast": (_advantages(lambda a: a * 0 + a[0]), {}),
    "whitened_twice": (_advantages(lambda a: a * 1.3 - 0.1), {}),
    "one_reward_for_all": (None, {"reward": "one"}),
    "always_right": (None, {"reward": "always"}),
    "reward_of_the_prompt": (None, {"reward": "prompt"}),
    "reward_at_random": (None, {"reward": "random"}),
    "mask_late": (_mask(_late), {}),
    "mask_early": (_mask(_early), {}),
    "untempered_trainer": (_untempered, {}),
    "dropout": (_dropout, {}),
    "optimizer_of_a_copy": (_back(), {}),
    "tensor_left_out": (_back("q_proj"), {}),
    "reference_follows": (_after_steps(_reference_follows), {"beta": 0.1}),
    "kl_maximised": (_set(beta=-0.1), {"beta": 0.1}),
    "loss_sign": (_loss, {}),
    "backward_scaled": (_gradients, {}),
    "lr_scaled": (_rate, {}),
}
"""Name in `bugs.py` -> how it is planted, and settings."""


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _named(logged: list[dict[str, float]]) -> list[str]:
    """What metrics say that have one right value: all groups of equal rewards, another rate than was set."""
    flat = [step["frac_reward_zero_std"] for step in logged if "frac_reward_zero_std" in step]
    rates = {step["learning_rate"] for step in logged if step.get("learning_rate", 0.0) > RATE}
    found = [f"`learning_rate` is {max(rates):g} where {RATE:g} was set"] if rates else []
    return found + (["`frac_reward_zero_std` is 1 in each step"] if flat and min(flat) == 1.0 else [])


def _rewarded(kind: str) -> Callable[..., list[float]]:
    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        if kind == "always":
            return [1.0] * len(completions)
        if kind == "random":
            return [random.random() for _ in completions]
        texts = prompts if kind == "prompt" else completions
        scores = [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]
        return scores[:1] if kind == "one" else scores

    return reward


def trl_main(model: str, name: str) -> None:
    """One run, in TRL's environment; prints what it said as the last line."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    plant, settings = BUGS[name]
    said, error = _Said(), ""
    for logger in (logging.getLogger(), logging.getLogger("transformers"), logging.getLogger("trl")):
        logger.addHandler(said)
    rows = [{"prompt": f"<|user|>{a}+{a + 3}=?<|end|><|assistant|>"} for a in range(10, 90)]
    config = GRPOConfig(
        output_dir=os.path.join(model, "trl"), use_cpu=True, bf16=False, per_device_train_batch_size=16,
        num_generations=GROUP, max_completion_length=12, learning_rate=RATE, max_steps=STEPS, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, gradient_checkpointing=False, num_iterations=2,
        dataloader_pin_memory=False, beta=settings.get("beta", 0.0),
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer = GRPOTrainer(
                model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
                reward_funcs=_rewarded(settings.get("reward", "")),
                args=config,
                train_dataset=Dataset.from_list(rows),
                processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            )
            if plant is not None:
                plant(trainer)
            trainer.train()
        except Exception as problem:  # what a bug may end in
            error = f"{type(problem).__name__}: {problem}"
    lines = sorted({*said.lines, *(str(w.message) for w in caught), *_named(trainer.state.log_history)})
    weights = sum(float(p.detach().double().abs().sum()) for p in trainer.model.parameters())
    print(json.dumps({"said": lines, "error": error, "steps": trainer.state.global_step, "weights": weights}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="interpreter with TRL")
    own = parser.parse_args()
    from slime_commands.init.tiny_model import write_random_model

    version = "import trl; print(trl.__version__)"
    asked = subprocess.run([own.trl_python, "-c", version], capture_output=True, text=True, check=True)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="slime-zoo-trl-") as folder:
        write_random_model(Path(folder), 0)
        for name in BUGS:
            command = [own.trl_python, str(Path(__file__).resolve()), "--run", folder, name]
            env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stderr[-2000:], file=sys.stderr)
                return 1
            found[name] = json.loads(done.stdout.splitlines()[-1])
            print(name, found[name], file=sys.stderr, flush=True)
    sound = {json.dumps(BUGS[name][1]): found.pop(name) for name in [*found] if name.startswith("sound")}
    usual = {line for one in sound.values() for line in one["said"]}
    assert not any(one["error"] for one in sound.values()), sound
    new = {}
    for name, one in found.items():
        beside = sound[json.dumps({k: v for k, v in BUGS[name][1].items() if k != "reward"})]
        assert one["error"] or one["weights"] != beside["weights"], f"{name} changes nothing: it is not planted"
        new[name] = [*(line for line in one["said"] if line not in usual), *filter(None, [one["error"]])]
    table = {"version": asked.stdout.split()[-1], "steps": STEPS, "said": new}
    Path(__file__).with_name("trl.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        trl_main(*sys.argv[2:])
    else:
        sys.exit(main())
