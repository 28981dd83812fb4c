"""What an estimator declares about itself is checked before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_sandbox_local import Isolation, isolation

from slime_core.config.load import load_settings
from slime_core.errors import ConfigError, PluginError, PluginSignatureError
from slime_core.launch.components import resolve_components
from slime_core.plugins.registry import ComponentRef, Registry

BASE = [
    "--hf-checkpoint", "/m", "--prompt-data", "p.jsonl", "--rm-type", "exact", "--num-rollout", "3",
    "--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "16",
]  # fmt: skip


def test_a_setting_the_estimator_requires_is_named_with_its_flag() -> None:
    argv = [*BASE, "--advantage-estimator", "reinforce_plus_plus"]
    with pytest.raises(ConfigError, match=r"needs normalize_advantages = True.*type --normalize-advantages"):
        resolve_components(load_settings(argv, env={}))
    parts, _ = resolve_components(load_settings([*argv, "--normalize-advantages"], env={}))
    assert parts.estimator.requires == {"normalize_advantages": True}


def test_what_the_core_alone_lacks_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_core.launch.components.installed", lambda name: None)
    alone = Registry()
    alone.add(ComponentRef("rewards", "math", "slime_reward_math:reward", distribution="slime-reward-math"))
    monkeypatch.setattr("slime_core.launch.components.current_registry", lambda: alone)
    for reward in ("math", "boxed_math"):
        with pytest.raises(PluginError) as caught:
            resolve_components(load_settings([*BASE, "--rm-type", reward], env={}))
        assert str(caught.value) == (
            "the run needs plugins that are not installed: generators/single_turn, buffers/fifo, estimators/grpo;"
            " pip install slime-rl"
        )


def test_a_group_of_one_is_refused_to_estimators_that_compare(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone = [*BASE, "--n-samples-per-prompt", "1"]
    with pytest.raises(ConfigError, match=r"1 \(flag\): every advantage of .*'grpo' is zero.*--n-samples-per-prompt 8"):
        resolve_components(load_settings(alone, env={}))
    resolve_components(load_settings([*alone, "--advantage-estimator", "ppo"], env={}))
    resolve_components(load_settings([*alone, "--disable-rewards-normalization"], env={}))
    assert "is zero" not in caplog.text
    path = tmp_path / "own.py"
    path.write_text("def own(args, rollout_data): ...\n")
    resolve_components(load_settings([*alone, "--custom-advantage-function-path", f"{path}:own"], env={}))
    assert "every advantage of --advantage-estimator 'grpo' is zero" in caplog.text, "or whatever that function makes"


def test_a_trainer_without_a_critic_is_refused_to_estimators_that_need_one(tmp_path: Path) -> None:
    path = tmp_path / "trainer.py"
    methods = "log_probs(self, batch, micro_batches, *, role='actor')", "named_weights(self)"
    body = "".join(f"    def {m}: ...\n" for m in ("train_step(self, batch, micro_batches, loss_fn)", *methods))
    path.write_text(f"class Actor:\n    def __init__(self, args): ...\n{body}")
    argv = [*BASE, "--train-backend", f"{path}:Actor"]
    resolve_components(load_settings(argv, env={}))
    with pytest.raises(ConfigError, match=r"'ppo' needs a critic, and --train-backend .*Actor' has none"):
        resolve_components(load_settings([*argv, "--advantage-estimator", "ppo"], env={}))


def test_settings_of_a_critic_without_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    roles = tmp_path / "roles.yaml"
    roles.write_text("megatron: [{role: critic, overrides: {weight_decay: 0.1}}]")
    given = ["--critic-lr", "1e-4", "--value-clip", "0.1", "--megatron-config-path", str(roles)]
    resolve_components(load_settings([*BASE, *given], env={}))
    assert "'grpo' has no critic: --critic-lr" in caplog.text
    assert "--value-clip" in caplog.text
    assert f"the entry for critic of --megatron-config-path {str(roles)!r}" in caplog.text
    with pytest.raises(ConfigError, match=r"--num-critic-only-steps 3 .*'grpo' has no critic to train"):
        resolve_components(load_settings([*BASE, "--num-critic-only-steps", "3"], env={}))
    argv = [*BASE, "--advantage-estimator", "ppo", "--num-critic-only-steps", "3"]
    parts, _ = resolve_components(load_settings(argv, env={}))
    assert parts.needs_critic


def test_an_estimator_that_reads_a_teacher_needs_one(tmp_path: Path) -> None:
    path = tmp_path / "taught.py"
    path.write_text(
        "from slime_core import EstimatorBase\n\n\nclass Taught(EstimatorBase):\n    needs_teacher = True\n"
    )
    argv = [*BASE, "--advantage-estimator", f"{path}:Taught"]
    with pytest.raises(ConfigError, match=r"Taught' needs a teacher; type --use-opd"):
        resolve_components(load_settings(argv, env={}))
    opd = ["--use-opd", "--opd-type", "local", "--opd-teacher-load", "/t"]
    resolve_components(load_settings([*argv, *opd], env={}))
    with pytest.raises(ConfigError, match=r"--use-opd .*'sft_loss' uses no advantages"):
        resolve_components(load_settings([*BASE, *opd, "--loss-type", "sft_loss"], env={}))
    function = tmp_path / "loss.py"
    function.write_text("def loss(args, batch, logits, sum_of_sample_mean): ...\n")
    custom = [*BASE, *opd, "--loss-type", "custom_loss", "--custom-loss-function-path", str(function)]
    resolve_components(load_settings(custom, env={}))
    with pytest.raises(ConfigError, match=r"--use-opd .*'custom_loss' uses no advantages"):
        resolve_components(load_settings([*custom, "--disable-compute-advantages-and-returns"], env={}))


def test_functions_of_the_training_side_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def loss(args, batch, logits, sum_of_sample_mean): ...\n"
        "def post(args, rollout_id, rollout_data): ...\n"
        "def odd(args): ...\n"
    )
    loss = ["--loss-type", "custom_loss"]
    with pytest.raises(ConfigError, match=r"--loss-type .custom_loss. .* needs --custom-loss-function-path PATH"):
        resolve_components(load_settings([*BASE, *loss], env={}))
    with pytest.raises(ConfigError, match="'policy_loss' does not take a function; it works with custom_loss"):
        resolve_components(load_settings([*BASE, "--custom-loss-function-path", f"{path}:loss"], env={}))
    for name in ("loss", "post"):
        flags = [*loss, "--custom-loss-function-path", f"{path}:{name if name == 'loss' else 'odd'}"]
        flags += ["--rollout-data-postprocess-path", f"{path}:{'odd' if name == 'loss' else 'post'}"]
        with pytest.raises(PluginError, match=r"odd.*\(args, (batch|rollout_id)"):
            resolve_components(load_settings([*BASE, *flags], env={}))
    flags = [*loss, "--custom-loss-function-path", f"{path}:loss", "--rollout-data-postprocess-path", f"{path}:post"]
    parts, _ = resolve_components(load_settings([*BASE, *flags], env={}))
    assert parts.hooks.implemented("slime_train_data")
    assert parts.build_loss(load_settings([*BASE, *flags], env={}).args, None).needs_advantages


def test_a_required_switch_is_named_as_it_is_typed(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("grpo_std_normalization: true\n")
    argv = [*BASE, "--config", str(config), "--advantage-estimator", "dr_grpo"]
    with pytest.raises(ConfigError, match=r"needs grpo_std_normalization = False.*yaml:1\); type --disable-grpo-std"):
        resolve_components(load_settings(argv, env={}))
    path = tmp_path / "odd.py"
    head = "from slime_core import EstimatorBase\n\n\nclass Odd(EstimatorBase):\n"
    path.write_text(f"{head}    requires = {{'nosuch': 1}}\n")
    with pytest.raises(PluginError, match="requires 'nosuch', which is no setting"):
        resolve_components(load_settings([*BASE, "--advantage-estimator", str(path)], env={}))


HOOKS = {
    "--rollout-sample-hook-path": ("args, sample", True),
    "--rollout-sample-filter-path": ("args, groups", False),
    "--rollout-all-samples-process-path": ("args, all_groups, data_buffer", False),
    "--custom-rollout-log-function-path": ("rollout_id, args, samples, rollout_extra_metrics, rollout_time", False),
    "--custom-eval-rollout-log-function-path": ("rollout_id, args, data, extra_metrics", False),
    "--custom-reward-post-process-path": ("args, samples", False),
    "--custom-convert-samples-to-train-data-path": ("args, samples", False),
}
"""Flag -> parameters, under the names that THUDM/slime's users give them; whether `async def` will do."""


@pytest.mark.parametrize("flag", HOOKS)
def test_hooks_are_checked_before_anything_starts(flag: str, tmp_path: Path) -> None:
    parameters, may_wait = HOOKS[flag]

    def resolved(name: str, code: str) -> None:
        (tmp_path / name).write_text(f"{code}:\n    return None\n")
        _, resolver = resolve_components(load_settings([*BASE, flag, str(tmp_path / name)], env={}))
        assert any(r.ref.name == str(tmp_path / name) for r in resolver.used)

    resolved("right.py", f"def my_hook({parameters})")
    with pytest.raises(PluginSignatureError, match=rf"{flag} \(flag\): .*expected .*found my_hook\(alone\)"):
        resolved("wrong.py", "def my_hook(alone)")
    if may_wait:
        resolved("waits.py", f"async def my_hook({parameters})")
    else:
        with pytest.raises(PluginSignatureError, match=r"found async my_hook.*Make it a plain `def`"):
            resolved("waits.py", f"async def my_hook({parameters})")


def test_sample_hooks_that_a_rollout_function_leaves_out_are_said(tmp_path: Path, caplog) -> None:
    path = tmp_path / "own.py"
    path.write_text("def mine(args, rollout_id, data_source, evaluation=False):\n    return []\n")
    hook = tmp_path / "hook.py"
    hook.write_text("def note(args, sample):\n    return None\n")
    argv = [*BASE, "--rollout-function-path", str(path), "--rollout-sample-hook-path", str(hook)]
    resolve_components(load_settings(argv, env={}))
    assert any("without effect, since mine generates by itself" in r.getMessage() for r in caplog.records)


def test_saved_samples_take_the_place_of_generation(tmp_path: Path) -> None:
    argv = [*BASE, "--load-debug-rollout-data", str(tmp_path / "{rollout_id}.jsonl")]
    parts, _ = resolve_components(load_settings(argv, env={}))
    assert (parts.engine, parts.reward, parts.eval_function) == (None, None, None)
    source = parts.data_source(None)
    source.load_state_dict({"epoch": 3})
    assert source.state_dict() == {"epoch": 3}


NOT_READ = [
    ("grpo", "--gamma 0.9 --lambd 0.9", "--gamma 0.9 (flag), --lambd 0.9 (flag)"),
    ("ppo", "--gamma 0.9 --lambd 0.9 --disable-rewards-normalization", "--disable-rewards-normalization (flag)"),
    ("rloo", "--disable-grpo-std-normalization", "--disable-grpo-std-normalization (flag)"),
    ("cispo", "--eps-clip 0.1 --eps-clip-c 3", "--eps-clip-c 3.0 (flag)"),
    ("reinforce_plus_plus", "--normalize-advantages --gamma 0.9 --lambd 0.9", "--lambd 0.9 (flag)"),
    ("reinforce_plus_plus_baseline", "--normalize-advantages --disable-rewards-normalization", ""),
    ("dr_grpo", "--disable-rewards-normalization --disable-grpo-std-normalization", ""),
]


@pytest.mark.parametrize(("estimator", "flags", "unread"), NOT_READ)
def test_settings_that_the_estimator_does_not_read_are_said(
    estimator: str, flags: str, unread: str, caplog: pytest.LogCaptureFixture
) -> None:
    resolve_components(load_settings([*BASE, "--advantage-estimator", estimator, *flags.split()], env={}))
    told = [r.getMessage() for r in caplog.records]
    reason = f"without effect with --advantage-estimator {estimator!r}, which does not read it: "
    assert told == ([reason + unread] if unread else [])


def test_bitwise_log_probs_are_for_losses_on_them(tmp_path: Path) -> None:
    path = tmp_path / "loss.py"
    path.write_text("def loss(args, batch, logits, sum_of_sample_mean): ...\n")
    custom = ["--loss-type", "custom_loss", "--custom-loss-function-path", str(path)]
    for flags in (custom, ["--loss-type", "sft_loss"]):
        with pytest.raises(ConfigError, match=r"^--true-on-policy-mode \(flag\): --loss-type .* with policy_loss"):
            resolve_components(load_settings([*BASE, "--true-on-policy-mode", *flags], env={}))
    resolve_components(load_settings([*BASE, "--true-on-policy-mode"], env={}))


def test_a_reward_that_this_machine_cannot_isolate_programs_for(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Isolation({"user namespace": "not permitted"})
    monkeypatch.setattr(isolation, "isolation_here", lambda: here)
    argv = [*BASE[:4], *BASE[6:], "--rm-type"]
    both = ["weighted_sum", "--set", "plugins.weighted_sum.terms=[{reward: exact}, {reward: code}]"]
    for reward in (["code"], both):
        with pytest.raises(ConfigError, match=r"^--sandbox-isolation require: .*no user namespace \(not permitted\)"):
            resolve_components(load_settings([*argv, *reward], env={}))
    resolve_components(load_settings([*argv, "code", "--sandbox-isolation", "best-effort"], env={}))
