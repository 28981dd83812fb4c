"""SmolLM2-135M: a GRPO step against TRL, generation against `transformers.generate`, memory; all on CPU in float32.

    .venv/bin/python benchmarks/real_model.py --trl-python /tmp/trl-venv/bin/python

The model comes from the package index (recipe `smollm2`) into `outputs/bench`. The step is that of `end_to_end.py`
(its docstring says how to set TRL up): 64 answers of 24 tokens, with both cores, the CPU time with and without the
start. Generation is that of `engine.py`: 64 sequences of equal and of mixed lengths. `--wide` trains adapters of a
random model with the shape of SmolLM2-1.7B for two rollouts and prints its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from _harness import Parser

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "outputs/bench"
WIDE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 64,
}  # fmt: skip
"""Source: https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct/blob/main/config.json."""


def model_directory() -> Path:
    """Return the model's directory, which the recipe fills if it is missing."""
    from slime_commands.init.smollm2 import prepare

    from slime_core.config import Args

    target = FOLDER / "SmolLM2"
    prepare(Args(hf_checkpoint=str(target)))
    return target


def wide_model(model: Path) -> Path:
    """Write a random model with the tokenizer of the other and the shape of the 1.7B one."""
    from slime_embedded.models.decoder import init_weights

    from slime_core.models.config import load_model_config
    from slime_core.models.hf_io import copy_assets, write_config, write_weights

    target = FOLDER / "wide"
    if not (target / "model.safetensors.index.json").exists():
        copy_assets(model, target)
        write_config(target, json.loads((model / "config.json").read_text(encoding="utf-8")) | WIDE)
        write_weights(target, init_weights(load_model_config(target), seed=0).items())
    return target


def adapters(model: Path) -> None:
    """Train adapters for two rollouts, and print the most memory that the processes had."""
    rows, clock = FOLDER / "prompts.jsonl", FOLDER / "clock.jsonl"
    rows.write_text("".join(json.dumps({"input": f"Count to {n}."}) + "\n" for n in range(8)), encoding="utf-8")
    clock.unlink(missing_ok=True)
    words = ["--hf-checkpoint", str(model), "--prompt-data", str(rows), "--rm-type", "random", "--lora-rank", "8"]
    words += ["--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--lr", "1e-4"]
    words += ["--rollout-max-response-len", "24", "--apply-chat-template", "--overwrite", "--no-preflight"]
    words += ["--run-dir", str(FOLDER / "wide-run"), "--plugin-dir", str(HERE / "clock")]
    environment = {**os.environ, "BENCH_CLOCK_FILE": str(clock)}
    subprocess.run([sys.executable, "-m", "slime_core", "train", *words], env=environment, check=True, timeout=3000)
    last = json.loads(clock.read_text(encoding="utf-8").splitlines()[-1])
    print(f"adapters of a model with the shape of 1.7B: {last['peak_mib'] / 1024:.1f} GiB, {last['cpu']:.0f} CPU-s")


def main() -> None:
    parser = Parser(__doc__)
    trl = os.environ.get("TRL_PYTHON", sys.executable)
    parser.add_argument("--trl-python", default=trl, metavar="PATH", help="interpreter that has trl (TRL_PYTHON)")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--without-trl", action="store_true")
    parser.add_argument("--wide", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    model = model_directory()
    step = ["end_to_end.py", "--model", str(model), "--prompts", "8", "--new-tokens", "24", "--micro-batch", "32"]
    step += ["--threads", "2", "--rollouts", "3", "--repeats", str(options.repeats)]
    step += ["--only", "slime", *([] if options.without_trl else ["trl-tuned", "--trl-python", options.trl_python])]
    generation = ["engine.py", "--sizes", str(model), "--dtypes", "float32", "--concurrency", "64", "--tokens", "96"]
    generation += ["--clock", "cpu", "--repeat", str(options.repeats), "--mix-longest", "512"]
    for script, *words in (step, generation):
        print(f"== {script}", flush=True)
        subprocess.run([sys.executable, str(HERE / script), *words, "--busy-anyway"], check=True)
    if options.wide:
        adapters(wide_model(model))


if __name__ == "__main__":
    main()
