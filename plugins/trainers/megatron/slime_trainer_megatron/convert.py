"""`slime convert` (train): convert models between the layouts of Hugging Face and Megatron.

Loads torch and Megatron once an action is chosen; under torchrun every process does its part.
"""

from __future__ import annotations

from slime_core.errors import ConfigError
from slime_core.protocols import Command

ACTIONS = ("hf-to-megatron", "megatron-to-hf")

_HELP = """usage: slime convert hf-to-megatron --hf-checkpoint HF_DIR --save DIR [flags]
       slime convert megatron-to-hf --load MEGATRON_DIR --save DIR --hf-checkpoint HF_DIR [flags]

Convert a model between Hugging Face's layout and Megatron's (megatron.core.dist_checkpointing). Both ways and back is
the same bit for bit. --load, --ref-load, --opd-teacher-load and --critic-load of `slime train --train-backend megatron`
take either.

  --hf-checkpoint HF_DIR   the HF model; back to HF, the one it was made from: its tokenizer is copied, and weights that
                           are not trained (multi-token prediction)
  --load MEGATRON_DIR      of hf-to-megatron, or a commit or run directory of the Megatron trainer; --ckpt-step N takes
                           the commit with this number in its name
  --save DIR               the result; must not be there yet
  --dtype DTYPE            to Megatron: float32 or bfloat16, that of config.json when not given; 8-bit weights become
                           bfloat16
  --save-dtype DTYPE       to HF: float32 or bfloat16; as they are when not given
  --save-shard-size GB     to HF: largest file of weights, 5 when not given
  --device DEVICE          cpu when not given

One process holds the whole model. A larger one is converted by as many as its layout has:

  torchrun --nproc-per-node 4 -m slime_core convert hf-to-megatron ... --tensor-model-parallel-size 2
      --pipeline-model-parallel-size 2

The layout of the conversion is not remembered: any other reads the result. Exit status: 0, 1 when files cannot be read
or written, 2 for flags that cannot be honoured."""


def run(argv: list[str]) -> int:
    """Convert, and say what was done. Raises SlimeError."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    action, rest = argv[0], argv[1:]
    if action not in ACTIONS:
        raise ConfigError(f"slime convert: unknown action {action!r}. Type: slime convert {' or '.join(ACTIONS)}")
    if "-h" in rest or "--help" in rest:
        print(_HELP)
        return 0
    from slime_core.config import load_settings

    settings = load_settings(rest, command="show")
    args = settings.args
    for name in ("hf_checkpoint" if action == "hf-to-megatron" else "load", "save"):
        if not getattr(args, name):
            raise ConfigError(f"slime convert {action}: --{name.replace('_', '-')} is required")
    from slime_core.launch.ranks import is_leader, num_processes
    from slime_trainer_megatron.layout import Layout

    needed = Layout.from_args(args).model_size
    if num_processes() % needed:
        raise ConfigError(
            f"slime convert {action}: these parallel sizes need {needed} processes, and there are {num_processes()};"
            f" type torchrun --nproc-per-node {needed} -m slime_core convert {action} ..."
        )
    from slime_embedded.trainer.shared_settings import DTYPES

    from slime_trainer_megatron.checkpoints import convert

    if action == "hf-to-megatron":
        done = convert.hf_to_megatron(args)
    else:
        done = convert.megatron_to_hf(args, dtype=DTYPES[args.save_dtype] if settings.is_given("save_dtype") else None)
    if is_leader():
        print(done)
    return 0


command = Command(run)
