"""`slime rollout`: generate and score, write the samples, train nothing."""

from __future__ import annotations


def run(argv: list[str]) -> int:
    """Write one JSONL file per rollout, one sample a line, readable by `Sample.from_dict`."""
    from slime_core.config import load_settings
    from slime_core.launch.inline import prepare
    from slime_core.observability.run_dir import run_dir_of

    settings = load_settings(argv, command="rollout")
    args = settings.args
    if not args.save_debug_rollout_data:
        args.save_debug_rollout_data = str(run_dir_of(args) / "rollouts" / "rollout_{rollout_id:07d}.jsonl")
    stage = prepare(settings, learn=False).rollout_stage()
    try:
        stage.start()
        first = args.start_rollout_id or 0
        for rollout_id in range(first, first + (args.num_rollout or 1)):
            groups, metrics = stage.generate_groups(rollout_id)
            path = args.save_debug_rollout_data.format(rollout_id=rollout_id)
            print(
                f"rollout {rollout_id}: {sum(map(len, groups))} samples, reward"
                f" {metrics.get('rollout/raw_reward', float('nan')):.3f},"
                f" {metrics['perf/tokens_per_sec']:.0f} tokens/s -> {path}",
                flush=True,
            )
    finally:
        stage.stop()
    return 0
