"""--megatron-config-path: what differs between the actor's trainer and the critic's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from slime_trainer_megatron.arguments.role_settings import settle_role_settings

from slime_core.config import Args
from slime_core.config.foreign import find_owners
from slime_core.errors import ConfigError
from slime_core.launch.roles import role_args
from tests.unit.config.conftest import Load


@pytest.fixture
def roles(tmp_path: Path, load: Load) -> Any:
    def call(text: str, *argv: str, backend: str = "megatron") -> Any:
        file = tmp_path / "roles.yaml"
        file.write_text(text)
        return load("--train-backend", backend, "--megatron-config-path", str(file), *argv).args

    return call


def test_each_role_gets_its_own(roles: Any) -> None:
    args = roles(
        """
megatron:
  - {name: policy, role: actor, args: {lr: "3e-6", recompute-granularity: full, recompute_method: block}}
  - name: value model
    role: critic
    overrides: {lr: 1e-5, norm-epsilon: "1e-5", disable_bias_linear: true, moe_router_topk: "4"}
""",
        "--critic-lr", "1e-4", "--clip-grad", "0.5",
    )  # fmt: skip
    actor, critic = role_args(args, "actor"), role_args(args, "critic")
    assert (actor.lr, actor.recompute_granularity, actor.recompute_method) == (3e-6, "full", "block")
    assert (critic.lr, critic.critic_lr, critic.layernorm_epsilon) == (1e-5, None, 1e-5)
    assert (critic.add_bias_linear, critic.moe_router_topk, critic.recompute_granularity) == (False, 4, None)
    assert actor.clip_grad == critic.clip_grad == 0.5
    assert (args.lr, args.critic_lr) == (1e-6, 1e-4)
    assert "layernorm_epsilon" not in (args.model_extra or {})


def test_the_embedded_trainer_takes_slimes_own_settings(roles: Any) -> None:
    args = roles("megatron: [{role: critic, overrides: {weight_decay: 0.5, dtype: bfloat16}}]", backend="embedded")
    critic = role_args(args, "critic")
    assert (critic.weight_decay, critic.dtype, args.weight_decay) == (0.5, "bfloat16", 0.01)


def test_keys_of_the_users_own_keep_their_type(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("megatron: [{role: actor, args: {depth: '3', rate: '2', note: 5}}]")
    args = Args(megatron_config_path=str(tmp_path / "r.yaml"), depth=1, rate=0.5, note="text")
    settle_role_settings(args, ())
    assert args.role_settings == {"actor": {"depth": 3, "rate": 2.0, "note": 5}}
    (tmp_path / "r.yaml").write_text("megatron: [{role: actor, args: {depth: many}}]")
    with pytest.raises(ConfigError, match=r"r.yaml:1: actor: depth 'many': expected int"):
        settle_role_settings(args.model_copy(update={"role_settings": {}}), ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("critic: {lr: 1}", "unknown key 'critic'; the file has one, 'megatron'"),
        ("{}", "no key 'megatron'"),
        ("megatron: {role: actor}", "'megatron' is a list of entries"),
        ("megatron: [3]", r"megatron\[0\]: expected a mapping"),
        ("megatron: [{role: ref}]", "role 'ref': must be one of actor, critic"),
        ("megatron: [{role: actor, override: {}}]", "unknown key 'override'. Did you mean overrides?"),
        ("megatron: [{role: actor, overrides: {lr: 1}, args: {lr: 2}}]", "are the same; keep one"),
        ("megatron: [{role: actor, overrides: [1]}]", "'overrides' is a mapping"),
        ("megatron: [{role: actor}, {role: actor}]", r"megatron\[1\]: there is an entry for 'actor' already"),
        ("megatron: [{role: actor, args: {learning_rate: 1}}]", "unknown setting 'learning_rate'"),
        ("megatron: [{role: actor, args: {weight_decai: 1}}]", "Did you mean weight_decay?"),
        ("megatron: [{role: actor, args: {num_layrs: 1}}]", "Did you mean num_layers?"),
        ("megatron: [{role: actor, args: {rollout_batch_size: 1}}]", "is a setting of the whole run"),
        ("megatron: [{role: actor, args: {lr: fast}}]", r"--lr 'fast' \(.*roles.yaml:1: actor\): must be a number"),
        ("megatron: [{role: actor, args: {lr: true}}]", r"--lr True \(.*roles.yaml:1: actor\): must be a number"),
        ("megatron: [{role: actor, args: {num_layers: many}}]", "num_layers 'many': invalid int value: 'many'"),
        ("megatron: [{role: actor, args: {pretrained_checkpoint: x}}]", "set --load with --finetune"),
    ],
)
def test_mistakes_in_the_file(roles: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        roles(text)


def test_flags_of_another_trainer_are_refused(roles: Any) -> None:
    with pytest.raises(ConfigError, match="'num_layers' is Megatron's, and --train-backend embedded does not take it"):
        roles("megatron: [{role: actor, args: {num_layers: 2}}]", backend="embedded")


def test_owners_warn_of_a_roles_flags_too(roles: Any) -> None:
    args = roles("megatron: [{role: critic, args: {log_interval: 2}}]")
    args = args.model_copy(update={"role_settings": {}})
    [warning] = settle_role_settings(args, find_owners(["--no-plugins"], {})[0])
    assert warning.startswith("critic: without effect: --log-interval 2 (")
    assert warning.endswith("slime reports by itself")
