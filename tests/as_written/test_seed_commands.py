"""Commands as the texts that this project was asked to implement write them, with files and a model of ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slime_core.cli.main import main
from tests.conftest import TinyRun

ROOT = Path(__file__).parents[2]
ON_CPU = "--train-backend embedded --rollout-engine embedded"
"""What the error says to type where there is no GPU."""
FEW = "--num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 16 --rm-type random"
COMMANDS = {
    "quick start": "train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4"
    f" --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 {FEW} --prompt-data DATA CKPT",
    "workflow 1": "train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8"
    " --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --prompt-data DATA --input-key prompt"
    f" --label-key label --apply-chat-template {FEW} --save-interval 100 --eval-interval 50 CKPT",
    "asynchronous": "train_async.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8"
    f" --advantage-estimator grpo --async-buffer-size 4 --update-weights-interval 2 {FEW} --prompt-data DATA CKPT",
    "co-location": "train.py --colocate --actor-num-gpus-per-node 8 --sglang-mem-fraction-static 0.4"
    f" {FEW} --prompt-data DATA CKPT",
    "off-policy": f"train.py --use-tis --tis-threshold 0.9 --calculate-per-token-loss {FEW} --prompt-data DATA CKPT",
    "memory": f"train.py --recompute-activations --micro-batch-size 1 {FEW} --prompt-data DATA CKPT",
    "data": f"train.py --num-data-workers 4 --streaming-data {FEW} --prompt-data DATA CKPT",
    "evaluation": f"train.py --eval-prompt-data aime DATA --eval-prompt-data gsm8k DATA --n-samples-per-eval-prompt 2"
    f" --eval-interval 1 --eval-temperature 0.0 {FEW} --prompt-data DATA CKPT",
    "start from": f"train.py --initial-megatron-checkpoint MODEL {FEW} --prompt-data DATA CKPT",
}


@pytest.fixture
def words(tiny: TinyRun, tmp_path: Path):
    data = tmp_path / "data.jsonl"
    data.write_text(
        '{"prompt": "What is 2 + 2?", "label": "4"}\n{"prompt": "Solve: 3x = 12", "label": "x = 4"}\n'
        '{"prompt": [{"role": "system", "content": "You are a math tutor."}, {"role": "user", "content": "15 + 27?"}],'
        ' "label": "42"}\n' * 8
    )
    stand_ins = {"DATA": [data], "MODEL": [tiny.root / "model"], "CKPT": ["--hf-checkpoint", tiny.root / "model"]}

    def fill(command: str) -> list[str]:
        return [str(word) for name in command.split() for word in stand_ins.get(name, [name])]

    return fill


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_trains(program, words, tmp_path: Path, name: str) -> None:
    """From the working directory, with nothing but what is written, few rollouts, and the CPU's backends."""
    script, *argv = words(COMMANDS[name])
    short = ["--rollout-max-response-len", "4", "--num-threads", "1", "--no-preflight", *ON_CPU.split()]
    if "--input-key" not in argv:
        short += ["--input-key", "prompt", "--apply-chat-template"]
    done = program(ROOT / script, *argv, *short, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rollout 2/2" in done.stdout
    (run,) = (tmp_path / "outputs").glob("*")
    assert list(run.glob("checkpoints/rollout_*/model.safetensors")), "weights are there without --save"
    assert list(run.glob("tensorboard/events*")), "tensorboard --logdir outputs/ shows the run"


def test_the_response_needs_no_length(words, capsys: pytest.CaptureFixture[str]) -> None:
    argv = words(f"{FEW} --prompt-data DATA CKPT {ON_CPU}")
    assert main(["config", "show", *argv]) == 0
    shown = capsys.readouterr()
    assert "rollout_max_context_len: 512  # derived: the model's context" in shown.out
    assert shown.err.count("it may take what the prompt leaves of the model's 512 tokens") == 1


def test_model_scripts_set_both_arrays(tmp_path: Path) -> None:
    script = 'source "$1"; declare -p MODEL_ARGS CKPT_ARGS'
    for name in ("glm4-9B", "qwen3-4B", "qwen3-30B-A3B", "deepseek-v3", "llama3-8B"):
        path = ROOT / "scripts" / "models" / f"{name}.sh"
        done = subprocess.run(["bash", "-euc", script, "-", path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "--num-layers" in done.stdout
