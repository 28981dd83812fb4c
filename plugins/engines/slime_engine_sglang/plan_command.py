"""`slime engines` (serve): show the servers and routers that a run would start.

`plan` does, for this machine or one that is not there. Loads the engine that the settings name and, without
`--num-gpus` or `--device cpu`, torch, to count GPUs.
"""

from __future__ import annotations

from typing import Any

from slime_core.errors import ConfigError
from slime_core.plugins.commands import Parser
from slime_core.protocols import Command
from slime_core.text import json_text

COMMANDS = ("train", "eval", "rollout")

_HELP = """usage: slime engines plan [RUN.yaml] [--num-gpus N] [--for COMMAND] [--json] [flags]

Print what --rollout-engine would start: servers, their GPUs and arguments, routers. Nothing is started, and neither the
GPUs nor the models need to be there.

  RUN.yaml       same as --config RUN.yaml
  --num-gpus N   plan for N GPUs, over all nodes of --num-gpus-per-node; 0 is a machine without;
                 by default the GPUs that are visible here
  --for COMMAND  the command that would start them: train (default), eval, rollout; the last two leave every GPU to
                 inference
  --json         one JSON object

All other flags are settings; `slime train --help-all` lists them. Exit status: 0, or 2 when there can be no
such plan."""


def run(argv: list[str]) -> int:
    """Print the plan. Raises ConfigError and PluginError."""
    if not argv or "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0
    if argv[0] != "plan":
        raise ConfigError(f"slime engines: unknown action {argv[0]!r}. Type: slime engines plan")
    parser = Parser(prog="slime engines plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--num-gpus", type=int)
    parser.add_argument("--for", dest="command", choices=COMMANDS, default="train")
    parser.add_argument("--json", action="store_true")
    own, rest = parser.parse_known_args(argv[1:])
    if own.num_gpus is not None and own.num_gpus < 0:
        raise ConfigError(f"slime engines plan: --num-gpus {own.num_gpus} must not be negative")
    from slime_core.plugins.presets import load_settings

    settings = load_settings(rest, command="show")
    if own.command != "train":
        settings.derive("actor_num_gpus_per_node", 0, f"slime {own.command}")
    plan = _planner(settings)(settings, own.num_gpus)
    print(json_text(plan.to_dict(), indent=2) if own.json else plan.describe())
    return 0


def _planner(settings: Any) -> Any:
    """`launch_plan` of the class that `--rollout-engine` names."""
    from slime_core.launch.components import Resolver
    from slime_core.plugins.discovery import search_as

    search_as(settings.args)
    engine = Resolver(settings).setting("engines", "rollout_engine")
    planner = getattr(engine, "launch_plan", None)
    if planner is None:
        raise ConfigError(
            f"{settings.cite('rollout_engine')} starts no servers, so there is no plan; type --rollout-engine sglang"
        )
    return planner


command = Command(run, only_prints=True)
