"""Mistakes that cost users a run on GPUs, planted one at a time into a run file that is right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOOD: Mapping[str, Any] = {
    "input_key": "input",
    "label_key": "label",
    "apply_chat_template": True,
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 4,
    "num_steps_per_rollout": 2,
    "num_rollout": 40,
    "rollout_max_response_len": 8,
    "rm_type": "exact",
    "lr": 1e-4,
    "eval_interval": 10,
    "save_interval": 20,
}


@dataclass(frozen=True)
class Mistake:
    """A mistake, and how the report of `slime rehearse` names it."""

    name: str
    says: str
    """Words of the finding."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings; None leaves one out. `{dir}` is the directory of the run file."""
    code: str = ""
    """Text of `mine.py` beside the run file."""
    plant: Callable[[Path], None] | None = None
    """Changes files of the directory, which has `model`, `train.jsonl` and `eval.jsonl`."""
    stage: str = "check"
    level: str = "error"
    model: str = "dense"
    """"dense" or "experts"."""


# -- files ---------------------------------------------------------------------------------------------------


def _edit_json(name: str, **changes: Any) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        path = root / "model" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return plant


def _row(number: int, row: str) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        lines = (root / "train.jsonl").read_text().splitlines()
        lines[number] = row
        (root / "train.jsonl").write_text("\n".join(lines) + "\n")

    return plant


def _template(text: str) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        (root / "model" / "chat_template.jinja").write_text(text)
        _edit_json("tokenizer_config.json", chat_template=text)(root)

    return plant


def _no_template(root: Path) -> None:
    (root / "model" / "chat_template.jinja").unlink()
    path = root / "model" / "tokenizer_config.json"
    kept = {name: value for name, value in json.loads(path.read_text()).items() if name != "chat_template"}
    path.write_text(json.dumps(kept))


def _cut_weights(root: Path) -> None:
    path = root / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])


def _git_lfs_pointer(root: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1325416\n"
    (root / "model" / "model.safetensors").write_text(text)


def _one_shard_of_two(root: Path) -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (root / "model" / "model.safetensors").rename(root / "model" / shards[0])
    index = {"weight_map": dict(zip(("model.embed_tokens.weight", "model.norm.weight"), shards))}
    (root / "model" / "model.safetensors.index.json").write_text(json.dumps(index))


def _rows(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        rows = [json.loads(line) for line in (root / "train.jsonl").read_text().splitlines()]
        (root / "train.jsonl").write_text("".join(json.dumps(row | change(row)) + "\n" for row in rows))

    return plant


def _other_encoding(root: Path) -> None:
    with (root / "train.jsonl").open("ab") as file:
        file.write(b'{"input": "caf\xe9", "label": "1"}\n')


def _file(name: str, text: str) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        (root / name).write_text(text)

    return plant


def _torn_commit(root: Path) -> None:
    commit = root / "old" / "checkpoints" / "rollout_0000003"
    shutil.copytree(root / "model", commit)
    (commit / "manifest.json").write_text("{}")


def _no_tokenizer(root: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / "model" / name).unlink()


def _hook(body: str) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        folder = root / "acme"
        folder.mkdir()
        (folder / "acme_watch.py").write_text(f"import time\nfrom slime_core import hookimpl\n\n\n@hookimpl\n{body}")
        entry = '[project.entry-points."slime.plugins"]\nwatch = "acme_watch"\n'
        (folder / "pyproject.toml").write_text(f'[project]\nname = "acme-watch"\nversion = "1"\n{entry}')

    return plant


# -- code ----------------------------------------------------------------------------------------------------

MINE = "mine.py:mine"
_REWARD = {"rm_type": None, "custom_rm_path": MINE}
_GENERATE = {"custom_generate_function_path": MINE}
_WORLD = {
    "apply_chat_template": False,
    "custom_generate_function_path": "multi_turn",
    "environment_path": "mine.py:Mine",
    "rm_type": None,
    "plugins": {"multi_turn": {"observation_template": "{observation}"}},
}
_ENVIRONMENT = """
import time

class Mine:
    def __init__(self, args):
        pass

    def reset(self, sample):
        {reset}

    def step(self, action):
        {step}
"""
_ROLLOUT = "def mine(args, rollout_id, data_source, evaluation=False):\n"
MEGATRON = {"train_backend": "megatron"}

SETTINGS = (
    Mistake("batch", "drop one of the last two", {"global_batch_size": 100, "num_steps_per_rollout": 3}),
    Mistake("steps", "--num-steps-per-rollout 3", {"num_steps_per_rollout": 3}),
    Mistake("over_sampling", "--over-sampling-batch-size 4", {"over_sampling_batch_size": 4}),
    Mistake("key_typo", "rm_typ", {"rm_typ": "exact"}),
    Mistake("other_trainers_key", "--rollout-max-response-len", {"max_new_tokens": 8}),
    Mistake("lr_is_text", "lr", {"lr": "fast"}),
    Mistake("lr_not_finite", "lr", {"lr": float("nan")}),
    Mistake("no_reward", "--rm-type", {"rm_type": None}),
    Mistake("no_number_of_rollouts", "--num-rollout", {"num_rollout": None}),
    Mistake("eval_pairs", "expected pairs", {"eval_prompt_data": ["a", "a.jsonl", "b"]}),
    Mistake("temperature", "--rollout-temperature 0.0", {"rollout_temperature": 0.0}),
    Mistake(
        "split_without_megatron", "splits no model", {"train_backend": "embedded", "tensor_model_parallel_size": 2}
    ),
    Mistake("fp16", "--bf16", {"fp16": True}),
    Mistake("text_for_a_switch", "must be a valid boolean", {"use_kl_loss": "flase"}),
    Mistake("top_p", "--rollout-top-p 0.0", {"rollout_top_p": 0.0}),
    Mistake(
        "eval_key_typo",
        "unknown evaluation setting 'promptdata'",
        {"eval_prompt_data": None, "eval_config": "evaluation.yaml"},
        plant=_file("evaluation.yaml", "eval:\n  datasets:\n    - name: held\n      promptdata: eval.jsonl\n"),
    ),
)

LAYOUT = (
    Mistake("heads", "does not divide the model's 4 attention heads", MEGATRON | {"tensor_model_parallel_size": 3}),
    Mistake("layers", "cannot be spread evenly", MEGATRON | {"pipeline_model_parallel_size": 3}),
    Mistake("no_experts", "the model has no experts", MEGATRON | {"expert_model_parallel_size": 2}),
    Mistake(
        "world",
        "3 ranks cannot hold whole copies",
        MEGATRON | {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 3},
    ),
    Mistake(
        "context",
        "2 ranks cannot hold whole copies",
        MEGATRON | {"context_parallel_size": 4, "actor_num_gpus_per_node": 2},
    ),
    Mistake(
        "nodes",
        "6 ranks cannot hold whole copies",
        MEGATRON | {"tensor_model_parallel_size": 4, "actor_num_nodes": 2, "actor_num_gpus_per_node": 3},
    ),
    Mistake(
        "experts",
        "does not divide the model's 8 experts",
        MEGATRON | {"expert_model_parallel_size": 3, "actor_num_gpus_per_node": 3},
        model="experts",
    ),
    Mistake(
        "experts_world",
        "cannot hold whole copies of experts",
        MEGATRON | {"expert_model_parallel_size": 4, "actor_num_gpus_per_node": 2},
        model="experts",
    ),
    Mistake(
        "no_sequence_parallel",
        "needs --sequence-parallel",
        MEGATRON | {"tensor_model_parallel_size": 2},
        model="experts",
    ),
    Mistake("other_models_numbers", "36", MEGATRON | {"num_layers": 36}),
    Mistake(
        "fewer_samples_than_ranks",
        "less than a sample each",
        MEGATRON | {"actor_num_nodes": 4, "actor_num_gpus_per_node": 8},
    ),
    Mistake(
        "save_not_shared",
        "a directory of its own there",
        MEGATRON | {"actor_num_nodes": 2, "actor_num_gpus_per_node": 1, "save": "/tmp/out"},
    ),
)

CHECKED = (
    Mistake("one_sample", "every advantage", {"n_samples_per_prompt": 1, "rollout_batch_size": 32}),
    Mistake("save_below_a_file", "is no directory", {"save": "train.jsonl/out"}),
    Mistake("label_column", "no column 'answer'", {"label_key": "answer"}),
    Mistake("prompt_column", "no column 'question'", {"input_key": "question"}),
    Mistake("no_data", "no such file", {"prompt_data": "absent.jsonl"}),
    Mistake("no_eval_set", "absent.jsonl", {"eval_prompt_data": ["held", "absent.jsonl"]}),
    Mistake("row_without_prompt", "train.jsonl:151", plant=_row(150, '{"label": "5"}')),
    Mistake("row_is_no_json", "train.jsonl:151", plant=_row(150, '{"input": "1+1=?"')),
    Mistake("other_encoding", "not valid UTF-8", plant=_other_encoding),
    Mistake("slice_beyond_the_rows", "no rows", {"prompt_data": "train.jsonl@[100000:]"}),
    Mistake("data_as_csv", "cannot read .csv", {"prompt_data": "train.csv"}, plant=_file("train.csv", "input,label\n")),
    Mistake("one_label", "have the label '4'", level="warning", plant=_rows(lambda row: {"label": "4"})),
    Mistake(
        "answer_in_the_prompt",
        "ends with its label",
        level="warning",
        plant=_rows(lambda row: {"input": f"{row['input']} {row['label']}"}),
    ),
    Mistake(
        "evaluated_on_training_rows", "the same file", {"eval_prompt_data": ["held", "train.jsonl"]}, level="warning"
    ),
    Mistake("empty_stop", "every answer has the empty string", {"rollout_stop": [""]}),
    Mistake("warmup_never_ends", "the run has 80 steps", {"lr_warmup_iters": 5000}, level="warning"),
    Mistake("nothing_unclipped", "clips every change", {"eps_clip": 0.0}, level="warning"),
    Mistake(
        "system_role",
        "System role not supported",
        {"system_prompt": "Be brief."},
        plant=_template(
            "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
            "{% endif %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
        ),
    ),
    Mistake("context_below_the_prompt", "every prompt is over 3 tokens", {"rollout_max_context_len": 4}),
    Mistake(
        "reward_key",
        "--reward-key asks for 'acc'",
        _REWARD | {"reward_key": "acc"},
        "def mine(args, sample):\n    return {'score': 1.0}\n",
    ),
    Mistake(
        "option_typo",
        "Did you mean plugins.multi_turn.observation_template",
        _WORLD | {"plugins": {"multi_turn": {"observatoin_template": "{observation}"}}},
        code=_ENVIRONMENT.format(reset="return ''", step="return '', 0.0, True"),
    ),
    Mistake("reward_typo", "no rewards plugin 'exakt'", {"rm_type": "exakt"}),
    Mistake(
        "reward_import", "no_such_package", _REWARD, "import no_such_package\n\ndef mine(args, sample): return 1.0\n"
    ),
    Mistake(
        "reward_raises", "KeyError: 'gold'", _REWARD, "def mine(args, sample):\n    return sample.metadata['gold']\n"
    ),
    Mistake("reward_returns_text", "returned str", _REWARD, "def mine(args, sample):\n    return 'good'\n"),
    Mistake("reward_exits", "exit status 3", _REWARD, "import os\n\ndef mine(args, sample):\n    os._exit(3)\n"),
    Mistake(
        "reward_raises_on_a_row",
        "row 151",
        _REWARD,
        "def mine(args, sample):\n    return float(int(sample.label) > 0)\n",
        plant=_row(150, '{"input": "1+1=?", "label": "two"}'),
    ),
    Mistake("no_chat_template", "chat_template", plant=_no_template),
    Mistake("no_tokenizer", "no tokenizer there", plant=_no_tokenizer),
    Mistake("other_vocabulary", "beyond the model's vocabulary", plant=_edit_json("config.json", vocab_size=16)),
    Mistake(
        "no_generation_prompt",
        "ignores add_generation_prompt",
        level="warning",
        plant=_template("{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"),
    ),
    Mistake(
        "end_of_turn",
        "does not end generation",
        level="warning",
        plant=_template(
            "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '</tool>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
        ),
    ),
    Mistake("stop_tokens", "248046", {"rollout_stop_token_ids": [248046]}),
    Mistake("generate_signature", "mine", _GENERATE, "def mine(sample):\n    return sample\n"),
    Mistake("no_checkpoint", "no slime checkpoint there", {"load": "{dir}/absent"}),
    Mistake("torn_checkpoint", "rollout_0000003", {"load": "{dir}/old"}, plant=_torn_commit),
    Mistake("git_lfs_pointer", "git lfs pull", plant=_git_lfs_pointer, stage="inputs"),
    Mistake("missing_shard", "model-00002-of-00002.safetensors missing", plant=_one_shard_of_two, stage="inputs"),
    Mistake("cut_weights", "cut or damaged", plant=_cut_weights, stage="inputs"),
    Mistake("context_for_no_prompt", "positions", {"rollout_max_response_len": 600}, level="warning"),
    Mistake("prompt_length", "every prompt is over 3 tokens", {"rollout_max_prompt_len": 3}),
    Mistake(
        "no_reference", "absent", {"ref_load": "{dir}/absent", "use_kl_loss": True, "kl_loss_coef": 0.1}, stage="inputs"
    ),
    Mistake(
        "another_plugin_refuses",
        "no quota for this run",
        {"plugin_dir": ["acme"]},
        plant=_hook(
            "def slime_check(settings):\n    from slime_core import Finding, Level\n"
            "    return [Finding('quota', Level.ERROR, 'no quota for this run')]\n"
        ),
    ),
    Mistake("filter_typo", "nonzero", {"dynamic_sampling_filter_path": "nonzero_sdt"}),
    Mistake("lr_too_large", "unlearns", {"lr": 0.5}, level="warning"),
    Mistake(
        "converter_signature", "mine", {"custom_convert_samples_to_train_data_path": MINE}, "def mine():\n    pass\n"
    ),
)

SCORED = (
    Mistake(
        "rewards_all_equal",
        "nothing is learned",
        _REWARD,
        "def mine(args, sample):\n    return 1.0\n",
        stage="score",
        level="warning",
    ),
    Mistake(
        "reward_upside_down",
        "pays wrong answers more",
        _REWARD,
        "def mine(args, sample):\n    return float(sample.label not in sample.response)\n",
        stage="score",
        level="warning",
    ),
    Mistake(
        "filter_keeps_nothing",
        "keeps none of",
        {"dynamic_sampling_filter_path": MINE},
        "def mine(args, group):\n    return False\n",
        stage="score",
    ),
    Mistake(
        "filter_of_equal_rewards",
        "nothing is learned",
        _REWARD | {"dynamic_sampling_filter_path": "nonzero_std"},
        "def mine(args, sample):\n    return 0.0\n",
        stage="score",
    ),
    Mistake(
        "reward_raises_between_rows_read",
        "row 152",
        _REWARD,
        "def mine(args, sample):\n    return float(int(sample.label) > 0)\n",
        stage="score",
        level="warning",
        plant=_row(151, '{"input": "1+1=?", "label": "two"}'),
    ),
    Mistake(
        "reward_needs_the_network",
        "connects to 192.0.2.1",
        _REWARD,
        "import socket\n\ndef mine(args, sample):\n    try:\n"
        "        socket.create_connection(('192.0.2.1', 80), timeout=0.01).close()\n"
        "    except OSError:\n        pass\n    return float(sample.label in sample.response)\n",
        stage="generate",
        level="warning",
    ),
)

RUN = (
    Mistake(
        "generate_raises",
        "no tool here",
        _GENERATE,
        "async def mine(args, sample, sampling_params):\n    raise RuntimeError('no tool here')\n",
        stage="generate",
    ),
    Mistake("lr_zero", "no step changes the weights", {"lr": 0.0}, stage="train", level="warning"),
    Mistake(
        "hook_raises",
        "no dashboard here",
        {"plugin_dir": ["acme"]},
        stage="generate",
        plant=_hook("def slime_log_metrics(step, metrics):\n    raise RuntimeError('no dashboard here')\n"),
    ),
    Mistake(
        "hook_is_slow",
        "slime_rollout_end",
        {"plugin_dir": ["acme"]},
        stage="generate",
        level="warning",
        plant=_hook("def slime_rollout_end(rollout_id, groups, metrics):\n    time.sleep(6)\n"),
    ),
    Mistake(
        "hook_hangs",
        "not done within",
        {"plugin_dir": ["acme"]},
        stage="commit",
        plant=_hook("def slime_step_end(rollout_id, metrics):\n    time.sleep(1000)\n"),
    ),
    Mistake(
        "hook_does_not_load",
        "state of another version",
        {"plugin_dir": ["acme"]},
        stage="resume",
        plant=_hook(
            "def slime_save_state():\n    return {'acme-watch': {}}\n\n\n@hookimpl\n"
            "def slime_load_state(state):\n    raise RuntimeError('state of another version')\n"
        ),
    ),
    Mistake(
        "log_function_raises",
        "no column",
        {"custom_rollout_log_function_path": MINE},
        stage="train",
        code="def mine(rollout_id, args, samples, extra, seconds):\n    raise KeyError('no column')\n",
    ),
    Mistake(
        "eval_function_raises",
        "no answers here",
        {"eval_function_path": MINE},
        stage="generate",
        code=_ROLLOUT + "    raise RuntimeError('no answers here')\n",
    ),
    Mistake(
        "environment_hangs",
        "environment",
        _WORLD,
        stage="generate",
        code=_ENVIRONMENT.format(reset="return ''", step="time.sleep(1000)"),
    ),
    Mistake(
        "environment_raises",
        "no world today",
        _WORLD,
        stage="check",
        code=_ENVIRONMENT.format(reset="raise RuntimeError('no world today')", step="return '', 0.0, True"),
    ),
    Mistake(
        "environment_never_ends",
        "not done after 64 turns",
        _WORLD,
        stage="generate",
        level="warning",
        code=_ENVIRONMENT.format(reset="return ''", step="return 'go on', 0.0, False"),
    ),
    Mistake(
        "generate_after_a_token",
        "needs 9 tokens",
        _GENERATE,
        stage="generate",
        code=(
            "async def mine(args, sample, sampling_params, context):\n"
            "    out = await context.engine.generate(sample.tokens, sampling_params)\n"
            "    if args.hf_checkpoint and len(out.token_ids) > 0 and out.text != '42':\n"
            "        raise ValueError('needs 9 tokens')\n"
            "    sample.append_response_tokens(args, out.token_ids, out.log_probs, True, out.meta_info, out.text)\n"
            "    return sample\n"
        ),
    ),
    Mistake(
        "loss_not_finite",
        "finite",
        {"loss_type": "custom_loss", "custom_loss_function_path": MINE},
        stage="train",
        code="def mine(args, batch, logits, mean):\n    return logits.sum() * float('nan'), {}\n",
    ),
    Mistake(
        "advantages_of_wrong_length",
        "advantage",
        {"custom_advantage_function_path": MINE},
        stage="train",
        code="def mine(args, data):\n    data['advantages'] = data['returns'] = [r[:0] for r in data['log_probs']]\n",
    ),
    Mistake(
        "data_postprocess_raises",
        "no such key",
        {"rollout_data_postprocess_path": MINE},
        stage="train",
        code="def mine(args, rollout_id, data):\n    raise KeyError('no such key')\n",
    ),
    Mistake(
        "rollout_function_returns_nothing",
        "--rollout-function-path: must return",
        {"rollout_function_path": MINE},
        stage="generate",
        code=_ROLLOUT + "    return []\n",
    ),
    Mistake(
        "adapters_of_nothing", "no_such_proj", {"lora_rank": 4, "lora_target_modules": ["no_such_proj"]}, stage="start"
    ),
)
