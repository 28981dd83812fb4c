"""`docs/concepts/metrics.md` names every metric that runs emit, and no metric that none can."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from slime_engine_http.api.engine import HttpEngine
from slime_engine_http.incidents import Incidents
from slime_runs.events import EventLog

from slime_core.config import Args
from tests.conftest import Slime, TinyRun

PAGE = Path(__file__).parents[2] / "docs/concepts/metrics.md"


REWARD = """
def reward(args, sample, **kwargs):
    digits = sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)
    if sample.index % 16 == 5:
        raise ValueError("one of sixteen fails")
    kind = "digits" if digits else "none"
    return {"score": digits if sample.group_index % 3 else 1.0, "kind": kind, "digits": digits}
"""

GENERATE = """
from slime_generators.single_turn import generate as single_turn

async def generate(args, sample, sampling_params, *, context):
    sample = await single_turn(args, sample, sampling_params, context=context)
    sample.metadata["num_turns"] = 1
    sample.metadata["tool_stats"] = {"search": {"calls": 1, "errors": 0, "seconds": 0.5, "waited": 0.1}}
    return sample
"""


NEVER = """
from slime_core import FilterDecision

def dynamic_filter(args, samples):
    return FilterDecision(False, "never_good_enough", keep_when_insufficient=True)
"""

FORGETFUL = """
def buffer_filter(args, rollout_id, buffer, num_samples):
    buffer.clear()
    return []
"""


def documented() -> list[str]:
    """Return the names that list entries begin with, abbreviations written out, placeholders kept as `<...>`."""
    names: list[str] = []
    for row in re.findall(r"^- ((?:`[^`]+`(?:, )?)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        first = ""
        for name in re.findall(r"`([^`]+)`", row):
            if name.startswith("/"):
                name = first.rsplit("/", 1)[0] + name
            elif name.startswith("..."):
                name = first + name.removeprefix("...")
            else:
                first = name
            names.append(name)
    return names


def pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<[^>]*>", "[^/]+", name))


@pytest.fixture(scope="module")
def emitted(tiny: TinyRun, tiny_moe: TinyRun, slime: Slime, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the metrics of runs that between them switch on what can be."""
    root = tmp_path_factory.mktemp("metrics")
    (root / "rm.py").write_text(REWARD)
    (root / "gen.py").write_text(GENERATE)
    (root / "never.py").write_text(NEVER)
    (root / "forgetful.py").write_text(FORGETFUL)
    (root / "distil.yaml").write_text("plugins: {on_policy_distillation: {context: '{prompt} {label}'}}\n")
    runs: dict[str, dict[str, Any]] = {
        "kl": {
            "use_kl_loss": True, "kl_loss_coef": 0.01, "log_passrate": True, "offload": True,
            "over_sampling_batch_size": 6, "buffer_filter_path": root / "forgetful.py",
            "set": "plugins.adaptive_kl.target=0.05",
        },
        "filter": {
            "custom_rm_path": root / "rm.py", "reward_key": "score", "log_reward_category": "kind",
            "dynamic_sampling_filter_path": "nonzero_std", "over_sampling_batch_size": 6,
            "custom_generate_function_path": root / "gen.py", "n_samples_per_eval_prompt": 2,
            "eval_answer_path": "exact", "log_multi_turn": True, "loss_type": "kl_cov",
        },
        "tis": {
            "use_tis": True, "use_opsm": True,
            "over_sampling_batch_size": 5, "dynamic_sampling_filter_path": root / "never.py",
        },
        "mis": {
            "use_tis": True, "custom_tis_function_path": "mis", "tis_batch_normalize": True, "use_rs": True,
            "rs_veto_threshold": 1e-4, "rs_trust_region": "max", "rs_tr_threshold": 0.5,
        },
        "models": {
            "advantage_estimator": "ppo", "use_rollout_entropy": True,
            "use_opd": True, "opd_type": "local", "opd_teacher_load": tiny.root / "model",
        },
        "distillation": {
            "loss_type": "distillation", "use_opd": True, "opd_type": "self", "set": "plugins.distillation.top_k=8",
            "custom_rm_path": None, "rm_type": "on_policy_distillation", "config": root / "distil.yaml",
        },
        "plain": {
            "custom_rm_path": root / "rm.py", "reward_key": "score", "log_correct_samples": True,
            "advantage_estimator": "remax", "async": True,
        },
        "adapters": {"lora_rank": 2, "lora_adapters": ["a"]},
        "experts": {
            "hf_checkpoint": tiny_moe.root / "model", "use_rollout_routing_replay": True,
            "async": True, "async_mode": "full", "max_staleness": 1,
        },
    }  # fmt: skip
    names: set[str] = set()
    for name, changes in runs.items():
        slime("train", *tiny.argv(root / name, num_rollout=2, **changes))
        for line in (root / name / "metrics.jsonl").read_text().splitlines():
            names |= json.loads(line).keys() - {"step"}
    servers = HttpEngine(Args()).take_metrics() | Incidents(EventLog(None)).take_metrics()
    return names | servers.keys()


@pytest.mark.slow
def test_every_metric_is_documented(emitted: set[str]) -> None:
    patterns = [pattern(name) for name in documented()]
    assert sorted(name for name in emitted if not any(p.fullmatch(name) for p in patterns)) == []


@pytest.mark.slow
def test_every_documented_metric_is_emitted(emitted: set[str]) -> None:
    missing = [n for n in documented() if not any(pattern(n).fullmatch(name) for name in emitted)]
    # Those of SGLang's own answers and updates are asserted by the tests of its client, the count of control tokens in
    # messages by those of data that have some, those of kept tokens by the tests of `--use-sampling-mask`.
    elsewhere = {
        "perf/update_weights_pause_time", "rollout/content_special_tokens",
        "rollout/sampled_among", "rollout/sampled_among_share",
    }  # fmt: skip
    assert {n for n in missing if "spec_accept" not in n} - elsewhere == set()
