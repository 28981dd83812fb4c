"""What the policy loss is made with is resolved, built and checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime_core.config.load import load_settings
from slime_core.errors import ConfigError, PluginError, PluginSignatureError
from slime_core.launch.components import Components, resolve_components
from slime_core.learning.corrector import Corrector
from slime_core.learning.loss import PolicyLoss

BASE = [
    "--hf-checkpoint", "/m", "--prompt-data", "p.jsonl", "--rm-type", "exact", "--num-rollout", "3",
    "--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "16",
]  # fmt: skip


def resolved(*flags: Any) -> Components:
    parts, _ = resolve_components(load_settings([*BASE, *map(str, flags)], env={}))
    return parts


def policy_loss(*flags: Any) -> PolicyLoss:
    settings = load_settings([*BASE, *map(str, flags)], env={})
    parts, _ = resolve_components(settings)
    loss = parts.build_loss(settings.args, parts.build_estimator(settings.args))
    assert isinstance(loss, PolicyLoss)
    return loss


def names(*flags: Any) -> set[tuple[str, str]]:
    _, resolver = resolve_components(load_settings([*BASE, *map(str, flags)], env={}))
    return {(p["kind"], p["name"]) for p in resolver.provenance()}


def test_without_flags_nothing_is_corrected() -> None:
    loss = policy_loss()
    assert loss.corrector is None
    assert loss.reducer is None
    assert loss.old_policy == "reused"


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        (["--use-tis"], "tis"),
        (["--use-tis", "--custom-tis-function-path", "icepop"], "icepop"),
        (["--use-tis", "--custom-tis-function-path", "mis", "--tis-level", "sequence"], "mis"),
    ],
)
def test_corrections_by_name(flags: list[str], chosen: str) -> None:
    assert ("corrections", chosen) in names(*flags)
    loss = policy_loss(*flags)
    assert isinstance(loss.corrector, Corrector)
    assert loss.corrector.applies
    assert loss.old_policy == "recomputed"


def test_mismatch_metrics_need_no_correction() -> None:
    loss = policy_loss("--get-mismatch-metrics")
    assert loss.corrector is not None
    assert not loss.corrector.applies
    assert loss.corrector.reports_mismatch


def test_a_users_yaml_for_thudm_slimes_example_is_read(tmp_path: Path) -> None:
    """The keys of its MIS example, through `--custom-config-path`, with the built-in in place of its function."""
    path = tmp_path / "mis.yaml"
    path.write_text(
        "use_tis: true\nuse_rs: true\ntis_level: token\nrs_level: sequence\ntis_mode: mask\ntis_lower_bound: 0.5\n"
        "tis_upper_bound: 2.0\nrs_lower_bound: null\nrs_upper_bound: null\nrs_veto_threshold: 1.0e-4\n"
        "tis_batch_normalize: true\n"
    )
    settings = load_settings([*BASE, "--custom-config-path", str(path), "--custom-tis-function-path", "mis"], env={})
    assert settings.args.use_tis
    assert settings.args.rs_veto_threshold == 1e-4
    _, resolver = resolve_components(settings)
    assert ("corrections", "mis") in {(p["kind"], p["name"]) for p in resolver.provenance()}


def test_files_with_functions(tmp_path: Path) -> None:
    tis = tmp_path / "my_tis.py"
    tis.write_text(
        "def tis(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):\n"
        "    return pg_loss, loss_masks, {}\n"
    )
    reducer = tmp_path / "my_reducer.py"
    reducer.write_text(
        "def get_pg_loss_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):\n"
        "    return lambda values: values.sum() / 1000\n"
    )
    loss = policy_loss(
        "--use-tis", "--custom-tis-function-path", tis, "--custom-pg-loss-reducer-function-path", reducer
    )
    assert loss.reducer is not None
    assert loss.reducer([3], [2], [torch.ones(2)], False)(torch.ones(2)).item() == pytest.approx(0.002)


def test_a_reducer_is_tried_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def reducer(a, b, c, d):\n    return lambda values: values.sum() / 1000 if d else {}[b]\n")
    with pytest.raises(PluginError, match=r"raised TypeError: unhashable.* \(at .*mine.py:2\)"):
        resolved("--custom-pg-loss-reducer-function-path", path)
    without = [flag for flag in BASE if flag not in ("--rollout-max-response-len", "16")]
    argv = [*without, "--rollout-function-path", "sft", "--custom-pg-loss-reducer-function-path", "constant"]
    with pytest.raises(ConfigError, match="divides by --rollout-max-response-len N, which is not set"):
        resolve_components(load_settings(argv, env={}))


def test_a_reducer_by_name_gets_the_settings() -> None:
    loss = policy_loss("--custom-pg-loss-reducer-function-path", "constant")
    assert loss.reducer is not None
    assert loss.reducer([3], [2], [torch.ones(2)], False)(torch.ones(2)).item() == pytest.approx(2 / 16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--use-tis", "--tis-mode", "mask"],
         r"correction 'tis' does not read --tis-mode 'mask' \(flag\); choose one that does"
         r" \(--custom-tis-function-path mis\), or remove"),
        (["--use-tis", "--custom-tis-function-path", "mis", "--tis-clip-low", "0.5"],
         r"correction 'mis' does not read --tis-clip-low 0\.5 \(flag\)"),
        (["--use-tis", "--proximal-policy", "interpolate", "--custom-tis-function-path", "mis",
          "--tis-batch-normalize"],
         r"--proximal-policy 'interpolate' \(flag\): correction 'mis' normalises over the whole optimizer step"),
        (["--use-tis", "--loss-type", "sft_loss"],
         r"--use-tis \(flag\): --loss-type 'sft_loss' does not take a corrector"),
        (["--loss-type", "sft_loss", "--custom-pg-loss-reducer-function-path", "constant"],
         r"--custom-pg-loss-reducer-function-path 'constant' \(flag\): --loss-type 'sft_loss' does not take a reducer"),
        (["--use-opsm", "--loss-type", "sft_loss"],
         r"--use-opsm \(flag\): --loss-type 'sft_loss' does not read it; it works with policy_loss"),
        (["--use-tis", "--tis-clip", "0.5", "--tis-clip-low", "0.8"], r"--tis-clip-low 0\.8 exceeds --tis-clip 0\.5"),
    ],
)  # fmt: skip
def test_settings_that_would_be_ignored_or_contradict(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(*flags)


def test_a_correction_that_is_off_says_so(caplog: pytest.LogCaptureFixture) -> None:
    resolved("--tis-clip", "3")
    text = "--tis-clip 3.0 (flag) has no effect since neither --use-tis nor --get-mismatch-metrics is set."
    assert text in caplog.text


@pytest.mark.parametrize(
    ("flag", "text", "expected"),
    [
        ("--custom-tis-function-path", "def tis(args, pg_loss): ...\n",
         r"expected \(\*, args, pg_loss, train_log_probs"),
        ("--custom-pg-loss-reducer-function-path", "def reducer(loss_masks): ...\n",
         r"expected \(total_lengths, response_lengths, loss_masks, calculate_per_token_loss\[, args\]\)"),
    ],
)  # fmt: skip
def test_signatures_are_checked(tmp_path: Path, flag: str, text: str, expected: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(PluginSignatureError, match=expected):
        resolved("--use-tis", flag, path)


def test_a_policy_loss_without_advantages_is_refused() -> None:
    flag = "--disable-compute-advantages-and-returns"
    with pytest.raises(ConfigError, match=rf"^{flag} \(flag\): --loss-type 'policy_loss' needs advantages"):
        resolved(flag)
    resolved(flag, "--loss-type", "sft_loss")
