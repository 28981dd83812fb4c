"""End-to-end samples per second of a GRPO run: `slime train` against TRL's `GRPOTrainer`, same model, same work.

Each side is a process of its own, they take turns, and a rollout (generate, score, train, hand weights over) is timed
from the end of one to the end of the next, without the first. Set-up of the other side, once:

    python -m venv /tmp/trl-venv
    /tmp/trl-venv/bin/pip install torch==2.13.0
    /tmp/trl-venv/bin/pip install trl
    .venv/bin/python benchmarks/end_to_end.py --trl-python /tmp/trl-venv/bin/python

TRL runs twice: "tuned" is as fast as its settings allow here (no vLLM, which needs a GPU; `transformers.generate` on
the whole rollout at once; forward and backward over as many samples as slime packs; no gradient checkpointing; nothing
logged or saved), "defaults" keeps its batch of 8 per device and its gradient checkpointing. Both sides normalise
rewards within the group, recompute log-probs before the first of two optimizer steps, use no KL and AdamW. Another
algorithm, and so a row of its own, is "slime-declared": the engine's log-probs are taken for the old ones
(`--use-rollout-logprobs`), which TRL without vLLM does not have.

"with start" is the whole process: imports, loading the model, the first rollout too.

`--mix` draws the length of every answer from a log-normal distribution (median 64, at most 512), the same lengths on
both sides: `transformers.generate` goes on until the longest of its batch is done, and TRL trains on answers padded to
it. `--model` takes larger random models than the quick start's, or a directory with a model, such as the one of
`real_model.py`.

The last line is a bound: the time that the matrix products of this work take at the speed this machine multiplies
matrices of these shapes. No implementation in the same precision can be faster, so it says how large a ratio can get.
This file runs under both interpreters, so it imports slime and trl inside functions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from _harness import Parser, cpu_seconds, peak_mib, ratio, spread, table

HERE = Path(__file__).resolve().parent
STEPS_PER_ROLLOUT = 2
SLIME, DECLARED, TUNED, DEFAULTS = SIDES = ("slime", "slime-declared", "trl-tuned", "trl-defaults")
REWARD = '''"""Share of digits among the characters of the answer: cheap, and different within a group."""


def share_of_digits(text):
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def reward(args, sample):
    return share_of_digits(sample.response)
'''
GENERATE = '''"""single_turn with the end token ignored: every answer has the length drawn for it."""

import slime_generators.single_turn

LENGTHS = %s


async def generate(args, sample, sampling_params, *, context):
    length = LENGTHS[sample.index %% len(LENGTHS)]
    params = {**sampling_params, "ignore_eos": True, "max_new_tokens": length}
    return await slime_generators.single_turn.generate(args, sample, params, context=context)
'''


SHAPES: dict[str, dict[str, Any]] = {
    "0.3M": {},
    "5M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8},
    "30M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9, "num_attention_heads": 16,
            "num_key_value_heads": 8},
}  # fmt: skip
"""Differences from the quick start's model, whose heads have 32 dimensions."""
AIMS = {"0.3M, 20 tokens": 1.9, "0.3M, 120 tokens": 1.4, "0.3M, lengths of the mix": 5.0}
WITH_START = {"SmolLM2, 24 tokens": 4.0}
AIMS |= {"5M, 120 tokens": 1.5, "30M, 120 tokens": 1.5}
DECLARED_AIMS = {"0.3M, 20 tokens": 3.0, "0.3M, 120 tokens": 2.0}
"""Target ratios of processor time, compared with the tuned side."""
MIX_MEDIAN, MIX_SIGMA, MIX_LONGEST = 64, 1.0, 512


def drawn_lengths(count: int) -> list[int]:
    """Return log-normal lengths of answers, in tokens; the first is the longest allowed."""
    rng = random.Random(0)
    lengths = [max(1, min(MIX_LONGEST, round(MIX_MEDIAN * rng.lognormvariate(0, MIX_SIGMA)))) for _ in range(count)]
    return [MIX_LONGEST, *lengths[1:]]


@dataclass(frozen=True)
class Job:
    """The task of both sides; lengths in tokens."""

    model: str
    prompts: str
    """JSONL file with the column `prompt`: text with the chat template applied."""
    reward: str
    """Python file with `share_of_digits(text)`."""
    num_prompts: int
    prompt_tokens: int
    """Tokens of the longest prompt."""
    group_size: int
    lengths: list[int]
    """Lengths of the answers of a rollout, in tokens."""
    rollouts: int
    """Number of timed rollouts; an untimed rollout runs first."""
    threads: int
    """Number of threads; 0 keeps each side's defaults for threads and OpenMP."""
    micro_batch: int
    """Samples per forward and backward pass of TRL; slime packs as many tokens as these samples have on average."""
    trl_defaults: bool = False
    """Whether to keep TRL's defaults for batch per device and gradient checkpointing."""

    @property
    def samples(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def equal(self) -> bool:
        return len(set(self.lengths)) == 1


@dataclass(frozen=True)
class Measured:
    """The measurements of a process's run."""

    seconds: list[float]
    """Wall time of each timed rollout."""
    cpu_seconds: list[float]
    """CPU time of each timed rollout, of all threads and all started processes."""
    samples_per_rollout: int
    response_lengths: list[int]
    """Response lengths of the last rollout, in ascending order."""
    prompt_tokens: int
    """Number of prompt tokens of a rollout."""
    peak_mib: float
    """Most memory of the process."""
    whole_seconds: float = 0.0
    """CPU time of the process from its start to its end."""


# -- inputs ----------------------------------------------------------------------------------------------


def write_inputs(work: Path, num_prompts: int, shape: str) -> tuple[Path, Path, Path, int]:
    """Write the inputs of both sides, and count the tokens of the longest prompt.

    The model is like the quick start's with random weights, or one that is there; the prompts are text.
    """
    from slime_commands.init import task
    from slime_commands.init.tiny_model import hf_config, write_tokenizer
    from slime_embedded.models.decoder import init_weights

    from slime_core.data.tokenizer import load_tokenizer, render_prompt
    from slime_core.models.config import load_model_config
    from slime_core.models.hf_io import write_config, write_weights

    model, prompts, reward = work / "model", work / "prompts.jsonl", work / "bench_reward.py"
    if shape in SHAPES:
        write_config(model, {**hf_config(write_tokenizer(model)), "max_position_embeddings": 1024, **SHAPES[shape]})
        write_weights(model, init_weights(load_model_config(model), seed=0).items())
    else:
        model = Path(shape).resolve()
    tokenizer = load_tokenizer(model)
    problems, _ = task.split_problems()
    rows = [{"prompt": render_prompt(tokenizer, task.question(problem))} for problem in problems[:num_prompts]]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    reward.write_text(REWARD, encoding="utf-8")
    return model, prompts, reward, max(len(tokenizer(row["prompt"])["input_ids"]) for row in rows)


# -- slime -----------------------------------------------------------------------------------------------


def slime_command(job: Job, work: Path) -> list[str]:
    """Return the command of `slime train` with the default embedded engine and trainer."""
    generate = work / "bench_generate.py"
    generate.write_text(GENERATE % job.lengths, encoding="utf-8")
    longest = max(job.lengths)
    packed = job.micro_batch * (sum(job.lengths) // job.samples + job.prompt_tokens)
    flags: dict[str, Any] = {
        "hf-checkpoint": job.model,
        "prompt-data": job.prompts,
        "input-key": "prompt",
        "custom-rm-path": f"{job.reward}:reward",
        "custom-generate-function-path": f"{generate}:generate",
        "rollout-batch-size": job.num_prompts,
        "n-samples-per-prompt": job.group_size,
        "rollout-max-response-len": longest,
        "num-rollout": job.rollouts + 1,
        "num-steps-per-rollout": STEPS_PER_ROLLOUT,
        "max-tokens-per-gpu": max(packed, longest + 2 * job.prompt_tokens),
        "advantage-estimator": "grpo",
        "lr": "1e-4",
        "lr-decay-style": "constant",
        "weight-decay": "0.0",
        "device": "cpu",
        "dtype": "float32",
        **({"num-threads": job.threads} if job.threads else {}),
        "run-dir": str(work / "run"),
        "plugin-dir": str(HERE / "clock"),
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [
        "-m",
        "slime_core",
        "train",
        *words,
        "--use-dynamic-batch-size",
        "--calculate-per-token-loss",
        "--overwrite",
    ]


def run_slime(job: Job, python: str, work: Path, *more: str) -> Measured:
    clock = work / "clock.jsonl"
    clock.unlink(missing_ok=True)
    whole = run_process([python, *slime_command(job, work), *more], {"BENCH_CLOCK_FILE": str(clock)}, job.threads)
    events = [json.loads(line) for line in clock.read_text(encoding="utf-8").splitlines()]
    ends = [event for event in events if event["event"] == "step_end"]
    rollouts = [event for event in events if event["event"] == "rollout_end"]
    return Measured(
        seconds=differences([event["time"] for event in ends]),
        cpu_seconds=differences([event["cpu"] for event in ends]),
        samples_per_rollout=len(rollouts[-1]["response_lengths"]),
        response_lengths=sorted(rollouts[-1]["response_lengths"]),
        prompt_tokens=rollouts[-1]["prompt_tokens"],
        peak_mib=ends[-1]["peak_mib"],
        whole_seconds=whole,
    )


# -- TRL -------------------------------------------------------------------------------------------------


def run_trl(job: Job, python: str, work: Path) -> Measured:
    result = work / "trl.json"
    result.unlink(missing_ok=True)
    words = ["--busy-anyway", "--trl-job", json.dumps(asdict(job)), "--trl-result", str(result)]
    whole = run_process([python, str(Path(__file__).resolve()), *words], {}, job.threads)
    return replace(Measured(**json.loads(result.read_text(encoding="utf-8"))), whole_seconds=whole)


def trl_main(job: Job, result: Path) -> None:
    """Run the TRL process."""
    import runpy

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    if job.threads:
        torch.set_num_threads(job.threads)
    share_of_digits = runpy.run_path(job.reward)["share_of_digits"]
    rows = [json.loads(line) for line in Path(job.prompts).read_text(encoding="utf-8").splitlines()]
    rows = [rows[i % len(rows)] for i in range(job.num_prompts * (job.rollouts + 1))]
    seen: dict[str, list[int]] = {"lengths": [], "calls": []}

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen["calls"].append(len(completions))
        seen["lengths"] += [len(ids) for ids in completion_ids]
        return [share_of_digits(text) for text in completions]

    ends: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % STEPS_PER_ROLLOUT == 0:
                ends.append((time.time(), cpu_seconds()))

    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    if not job.equal:
        model.generate = generate_drawn_lengths(model, job.lengths, tokenizer.eos_token_id)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl_config(job, str(result.parent / "trl")),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    group = [row["prompt"] for row in rows[-job.num_prompts :]]
    prompt_tokens = job.group_size * sum(len(ids) for ids in tokenizer(group)["input_ids"])
    measured = Measured(
        seconds=differences([wall for wall, _ in ends]),
        cpu_seconds=differences([cpu for _, cpu in ends]),
        samples_per_rollout=seen["calls"][-1],
        response_lengths=sorted(seen["lengths"][-job.samples :]),
        prompt_tokens=prompt_tokens,
        peak_mib=peak_mib(),
    )
    result.write_text(json.dumps(asdict(measured)), encoding="utf-8")


def generate_drawn_lengths(model: Any, lengths: list[int], end: int) -> Any:
    """Return `model.generate` in which row `i` has its end token at `lengths[i]`, and none before."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    at = torch.tensor(lengths)

    class Ends(LogitsProcessor):
        def __init__(self, prompt: int) -> None:
            self.prompt = prompt

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            last = at == ids.shape[1] - self.prompt + 1
            scores[:, end] = -torch.inf
            scores[last] = -torch.inf
            scores[last, end] = 0.0
            return scores

    generate = model.generate

    def generate_with_ends(input_ids: torch.Tensor, **more: Any) -> Any:
        ends = LogitsProcessorList([Ends(input_ids.shape[1])])
        return generate(input_ids=input_ids, logits_processor=ends, **more)

    return generate_with_ends


def trl_config(job: Job, directory: str) -> Any:
    """Return TRL's settings: one generation of the whole batch, without logging."""
    from trl import GRPOConfig

    steps = STEPS_PER_ROLLOUT
    micro_batch = min(8 if job.trl_defaults else job.micro_batch, job.samples // steps)
    more = {} if job.trl_defaults else {"gradient_checkpointing": False}
    return GRPOConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=job.samples // steps // micro_batch,
        generation_batch_size=job.samples,
        num_generations=job.group_size,
        max_completion_length=max(job.lengths),
        generation_kwargs={"min_new_tokens": max(job.lengths)} if job.equal else None,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=steps * (job.rollouts + 1),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        **more,
    )


def differences(moments: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(moments)]


# -- both ------------------------------------------------------------------------------------------------


def run_process(command: list[str], environment: dict[str, str], threads: int) -> float:
    """Run to the end and return the CPU time; on failure print the output and stop."""
    before = cpu_seconds()
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if threads:
        env |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env | environment, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ... failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return cpu_seconds() - before


def versions(python: str, names: list[str]) -> str:
    """Return `name version, ...` from the interpreter. Raises SystemExit with the set-up commands if one is missing."""
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    if done.returncode:
        setup = __doc__.split("once:\n\n")[1].split("\n\n")[0]
        raise SystemExit(f"{python} lacks one of {', '.join(names)}. Set it up, then pass --trl-python:\n\n{setup}")
    return ", ".join(f"{name} {version}" for name, version in json.loads(done.stdout).items())


def main() -> None:
    parser = Parser(__doc__)
    trl = os.environ.get("TRL_PYTHON", sys.executable)
    parser.add_argument("--trl-python", default=trl, metavar="PATH", help="interpreter that has trl (TRL_PYTHON)")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=20, help="of every answer")
    parser.add_argument("--mix", action="store_true", help="log-normal lengths of answers instead")
    parser.add_argument("--model", default="0.3M", help=f"{', '.join(SHAPES)} parameters, or a model directory")
    parser.add_argument("--rollouts", type=int, default=3, help="timed rollouts of each process")
    parser.add_argument("--repeats", type=int, default=2, help="processes of each side, in turns")
    parser.add_argument("--threads", type=int, default=1, help="of each side; 0 is whatever each side does by itself")
    parser.add_argument("--micro-batch", type=int, default=128, help="samples per forward and backward pass")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=list(SIDES), help="sides to run")
    parser.add_argument("--trl-job", help=argparse.SUPPRESS)
    parser.add_argument("--trl-result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model not in SHAPES and not (Path(options.model) / "config.json").is_file():
        parser.error(f"--model {options.model}: {', '.join(SHAPES)}, or a directory with config.json")
    if options.trl_job:
        trl_main(Job(**json.loads(options.trl_job)), Path(options.trl_result))
        return
    print("slime side:", versions(sys.executable, ["slime-rl", "torch"]), flush=True)
    if set(options.only) - {SLIME, DECLARED}:
        print("trl side:  ", versions(options.trl_python, ["trl", "transformers", "torch"]), flush=True)
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as directory:
        compare(options, Path(directory))


def compare(options: argparse.Namespace, work: Path) -> None:
    """Run the sides in turns and print the table."""
    model, prompts, reward, prompt_tokens = write_inputs(work, options.prompts, options.model)
    samples = options.prompts * options.group_size
    job = Job(
        model=str(model),
        prompts=str(prompts),
        reward=str(reward),
        num_prompts=options.prompts,
        prompt_tokens=prompt_tokens,
        group_size=options.group_size,
        lengths=drawn_lengths(samples) if options.mix else [options.new_tokens] * samples,
        rollouts=options.rollouts,
        threads=options.threads,
        micro_batch=options.micro_batch,
    )
    runners = {
        SLIME: lambda: run_slime(job, sys.executable, work),
        DECLARED: lambda: run_slime(job, sys.executable, work, "--use-rollout-logprobs"),
        TUNED: lambda: run_trl(job, options.trl_python, work),
        DEFAULTS: lambda: run_trl(replace(job, trl_defaults=True), options.trl_python, work),
    }
    found: dict[str, list[Measured]] = {side: [] for side in options.only}
    for _ in range(options.repeats):
        for side, runs in found.items():
            runs.append(runners[side]())
            print(f"{side}: {', '.join(f'{s:.3f}' for s in runs[-1].seconds)} s per rollout", flush=True)
            check(side, runs[-1], job)
    lengths = "lengths of the mix" if options.mix else f"{options.new_tokens} tokens"
    report(f"{Path(options.model).name}, {lengths}", job, found, bound_seconds(job, found))


def bound_seconds(job: Job, found: dict[str, list[Measured]]) -> float:
    """Return the CPU time of the work's matrix products, at this machine's best speed for their shapes.

    A multiply-add of every weight counts: for the layers per token that has a successor, for the output layer per
    response token. It counts once to generate, three times to train, and once for the old log-probs of all steps but
    the first, whose log-probs are the old ones. A group's prompt counts once everywhere. Attention and everything else
    are not counted.
    """
    import torch

    hf = json.loads((Path(job.model) / "config.json").read_text(encoding="utf-8"))
    hidden, inner, heads = hf["hidden_size"], hf["intermediate_size"], hf["num_attention_heads"]
    projections = 2 * heads * hf["head_dim"] + 2 * hf["num_key_value_heads"] * hf["head_dim"]
    layers, head = hf["num_hidden_layers"] * hidden * (projections + 3 * inner), hf["vocab_size"] * hidden
    prompt = next(iter(found.values()))[0].prompt_tokens // job.group_size
    response = sum(job.lengths)
    passes = 1 + 3 + (STEPS_PER_ROLLOUT - 1) / STEPS_PER_ROLLOUT
    operations = 2 * passes * (layers * (response - job.samples + prompt) + head * response)
    torch.set_num_threads(1)
    best = 0.0
    for rows in (job.samples, 1024, job.micro_batch * 32):
        x, weight = torch.randn(rows, hidden), torch.randn(inner, hidden)
        for _ in range(50):
            started = time.process_time()
            torch.nn.functional.linear(x, weight)
            best = max(best, 2 * rows * hidden * inner / (time.process_time() - started))
    return operations / best


def check(side: str, measured: Measured, job: Job) -> None:
    """Check that a side did the requested work."""
    assert measured.samples_per_rollout == job.samples, f"{side}: {measured.samples_per_rollout} samples per rollout"
    assert measured.response_lengths == sorted(job.lengths), f"{side}: answers of {measured.response_lengths} tokens"
    assert len(measured.seconds) == job.rollouts, f"{side}: {len(measured.seconds)} timed rollouts"


def report(name: str, job: Job, found: dict[str, list[Measured]], bound: float) -> None:
    """Print the table: wall time, which the user waits for, and CPU time, which shows how far other load matters."""
    wall = {side: [s for run in runs for s in run.seconds] for side, runs in found.items()}
    cpu = {side: [s for run in runs for s in run.cpu_seconds] for side, runs in found.items()}
    of = str(job.lengths[0]) if job.equal else f"{min(job.lengths)} to {max(job.lengths)}"
    threads = f"{job.threads} thread(s)" if job.threads else "threads as each side comes"
    print(
        f"\n{job.samples} samples ({job.num_prompts} prompts x {job.group_size}) of {of} new tokens,"
        f" {STEPS_PER_ROLLOUT} optimizer steps per rollout, float32, CPU, {threads}\n"
    )
    whole = {side: [run.whole_seconds for run in runs] for side, runs in found.items()}
    header = ["side", "rollouts", "wall s", "spread", "samples/s", "CPU s", "spread", "samples/CPU-s", "MiB"]
    rows = []
    for side in found:
        wall_s, cpu_s = statistics.median(wall[side]), statistics.median(cpu[side])
        cells = [f"{wall_s:.3f}", spread(wall[side]), f"{job.samples / wall_s:.0f}"]
        cells += [f"{cpu_s:.3f}", spread(cpu[side]), f"{job.samples / cpu_s:.0f}"]
        rows.append([side, str(len(wall[side])), *cells, f"{max(run.peak_mib for run in found[side]):.0f}"])
    print(table(header, rows))
    print()
    what = f"GRPO step, {name}"
    ours = {SLIME: AIMS.get(name), DECLARED: DECLARED_AIMS.get(name)}
    for own, side in itertools.product([s for s in found if s in ours], [s for s in found if s not in ours]):
        ratio(f"{what}, {side} / {own}, wall", wall[own], wall[side])
        aim = ours[own] if side == TUNED else None
        floor = bound if own == SLIME else None  # which computes old log-probs
        ratio(f"{what}, {side} / {own}, processor", cpu[own], cpu[side], floor=floor, aim=aim)
        ratio(f"{what}, {side} / {own}, processor with start", whole[own], whole[side], aim=WITH_START.get(name))
    bounds = ", ".join(f"{statistics.median(cpu[side]) / bound:.1f}x for {side}" for side in found)
    print(f"bound: matrix products alone {bound:.3f} CPU-s per rollout; CPU time over the bound: {bounds}")


if __name__ == "__main__":
    main()
