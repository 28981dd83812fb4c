"""The contracts of advantage estimators and of functions that replace their advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from slime_core.protocols import Args
from slime_core.sample import LARGEST_SCORE, is_score
from slime_testing_contracts.base import Contract, only_where

if TYPE_CHECKING:
    import torch

    from slime_core.protocols import AdvantageEstimator, AdvantageInputs, LossInputs, RewardInputs

LENGTHS = (3, 1, 6, 4)


class EstimatorContract(Contract):
    """Checks of shapes and finite numbers; results must not depend on order, split or other samples of the batch."""

    kind = "estimators"
    default_args: ClassVar[Mapping[str, Any]] = {"rollout_max_response_len": 64, "n_samples_per_prompt": 4}
    centered: ClassVar[bool] = False
    """True: shaped rewards sum to zero in every group, so equal rewards become zeros."""
    golden: ClassVar[Sequence[tuple[Sequence[float], Sequence[int], Sequence[float]]]] = ()
    """(rewards, group indices, expected shaped rewards), from a reference other than the plugin."""
    components: ClassVar[Sequence[str]] = ()
    """Names of the parts of a reward that the estimator needs; every reward of the suite is split evenly over them."""

    @property
    def settings(self) -> Args:
        """Return the settings, updated with the estimator's `defaults` and `requires`."""
        made = self.estimator_class
        return super().settings.model_copy(update={**made.defaults, **made.requires, **self.args})

    @property
    def estimator_class(self) -> type[Any]:
        """Return the class as the launcher builds it; a THUDM/slime-style function is put on top of the base class."""
        from slime_core.estimator import estimator_class

        return estimator_class(self.resolved.obj, self.component)

    @property
    def estimator(self) -> AdvantageEstimator:
        """Return a new estimator."""
        return cast("AdvantageEstimator", self.estimator_class(self.settings))

    def shape(
        self, rewards: Sequence[float], groups: Sequence[int], rollout_ids: Sequence[int] | None = None
    ) -> list[float]:
        """Return shaped rewards; without `rollout_ids` every sample is a separate rollout."""
        return self.estimator.shape_rewards(self.settings, self._of_rollout(rewards, groups, rollout_ids))

    def shape_turns(
        self,
        rewards: Sequence[float],
        groups: Sequence[int],
        turns: Sequence[Sequence[tuple[float | None, str]]],
        rollout_ids: Sequence[int] | None = None,
    ) -> list[list[float]]:
        """Return shaped turn rewards; `turns` are (reward, state) of each turn of each sample."""
        inputs = self._of_rollout(rewards, groups, rollout_ids, turns)
        estimator = self.estimator
        estimator.shape_rewards(self.settings, inputs)
        return estimator.shape_turns(self.settings, inputs)

    def _of_rollout(
        self,
        rewards: Sequence[float],
        groups: Sequence[int],
        rollout_ids: Sequence[int] | None,
        turns: Sequence[Sequence[tuple[float | None, str]]] | None = None,
    ) -> RewardInputs:
        """Return the inputs of a rollout, whose turns have two tokens each and one of a tool between them."""
        from slime_core.protocols import RewardInputs
        from slime_core.sample.provenance import TurnSpan

        n = len(rewards)
        share = len(self.components) or 1
        return RewardInputs(
            list(rewards), list(groups), list(rollout_ids or range(n)), [10] * n, [False] * n,
            baselines=[0.25] * n if self.estimator_class.needs_greedy_baseline else None,
            components=[dict.fromkeys(self.components, reward / share) for reward in rewards],
            turns=[
                [TurnSpan(3 * k, 3 * k + 2, reward, state=state) for k, (reward, state) in enumerate(row)]
                for row in turns or [[(None, "start")]] * n
            ],
            metadata=[{} for _ in rewards],
        )  # fmt: skip

    def test_it_speaks_of_settings_that_exist(self) -> None:
        """Check that `defaults`, `requires` and `ignores` name settings, and that the first two do not contradict."""
        from slime_core.config.spec import flag_specs

        made = self.estimator_class
        defaults, requires = made.defaults, made.requires
        named = {*defaults, *requires, *made.ignores}
        unknown = sorted(named - flag_specs().keys())
        assert not unknown, f"`defaults`, `requires`, `ignores` name settings; these are none: {', '.join(unknown)}"
        differ = [name for name, value in defaults.items() if requires.get(name, value) != value]
        assert not differ, f"`defaults` and `requires` contradict each other in {', '.join(differ)}"

    # -- rewards -------------------------------------------------------------------------------------

    def test_shaped_rewards_are_finite_numbers(self) -> None:
        """Check for a reward per sample with uneven groups, a group of one, equal rewards, and the largest reward."""
        for largest in (2.0, LARGEST_SCORE):
            rewards = [1.0, 0.0, largest, 2.0, 2.0, 2.0, 3.0]
            shaped = self.shape(rewards, [0, 0, 0, 1, 1, 1, 2])
            assert len(shaped) == len(rewards), f"{len(rewards)} rewards became {len(shaped)}"
            wrong = [value for value in shaped if not isinstance(value, float) or not is_score(value / 1e3)]
            assert not wrong, f"shaped rewards are finite floats of at most {1e3 * LARGEST_SCORE:g}; found {wrong!r}"

    def test_golden(self) -> None:
        """Check the author's reference numbers."""
        for rewards, groups, expected in self.golden:
            assert self.shape(rewards, groups) == pytest.approx(list(expected), abs=1e-5)

    def test_groups_go_by_index(self) -> None:
        """Check that the order of the samples does not matter."""
        rewards, groups = [1.0, 0.0, 0.5, 2.0, 3.0, 0.25], [0, 0, 0, 1, 1, 1]
        order = [3, 0, 5, 1, 4, 2]
        straight = self.shape(rewards, groups)
        mixed = self.shape([rewards[i] for i in order], [groups[i] for i in order])
        expected = [straight[i] for i in order]
        assert mixed == pytest.approx(expected, abs=1e-6), "groups go by group_indices, not by position in the list"

    def test_fan_out_counts_once(self) -> None:
        """Check that copies of one execution change no shaped reward: see docs/concepts/fan-out.md."""
        rewards, groups, copies = [1.0, 0.0, 0.5, 2.0], [0, 0, 0, 0], [3, 1, 2, 1]
        straight = self.shape(rewards, groups)
        of = [i for i, count in enumerate(copies) for _ in range(count)]
        shaped = self.shape([rewards[i] for i in of], [groups[i] for i in of], of)
        expected = [straight[i] for i in of]
        assert shaped == pytest.approx(expected, abs=1e-6), (
            "siblings (equal rollout_ids) are one member: ops.group_members"
        )

    @only_where(lambda suite: suite.centered)
    def test_centered(self) -> None:
        """Check that group sums are zero, for estimators that declare `centered`."""
        shaped = self.shape([1.0, 0.0, 0.5, 7.0, 7.0], [0, 0, 0, 1, 1])
        assert sum(shaped[:3]) == pytest.approx(0, abs=1e-5)
        assert shaped[3:] == pytest.approx([0, 0], abs=1e-6)

    # -- turns ---------------------------------------------------------------------------------------

    def test_shaped_turn_rewards_are_finite_numbers(self) -> None:
        """Check for a number per turn with uneven and missing turns, missing and equal rewards, and the largest one."""
        for largest in (2.0, LARGEST_SCORE):
            turns = [*_TURNS, [(largest, "b"), (None, "c")], []]
            shaped = self.shape_turns([1.0, 0.0, 0.5, 2.0, 2.0, 1.0, largest, 0.0], [*_TURN_GROUPS, 3, 3], turns)
            assert [len(row) for row in shaped] == [len(row) for row in turns], "one number per turn of every sample"
            wrong = [v for row in shaped for v in row if not isinstance(v, float) or not is_score(v / 1e3)]
            assert not wrong, f"shaped turn rewards are finite floats of at most {1e3 * LARGEST_SCORE:g}; {wrong!r}"

    def test_turns_go_by_group_and_rollout(self) -> None:
        """Check that neither the order of the samples nor copies of an execution change a shaped turn reward."""
        straight = self.shape_turns(_TURN_REWARDS, _TURN_GROUPS, _TURNS)
        of = [3, 0, 5, 0, 1, 4, 2, 3]
        moved = self.shape_turns(
            [_TURN_REWARDS[i] for i in of], [_TURN_GROUPS[i] for i in of], [_TURNS[i] for i in of], of
        )
        for place, i in enumerate(of):
            assert moved[place] == pytest.approx(straight[i], abs=1e-6), (
                "groups go by group_indices, and siblings (equal rollout_ids) count as one member"
            )

    # -- advantages ----------------------------------------------------------------------------------

    def test_advantages_have_the_responses_shapes(self) -> None:
        """Check that advantages and returns have a finite float32 tensor of [response_length] per sample."""
        import torch

        result = self.estimator.advantages(self.settings, _inputs())
        for parts in (result.advantages, result.returns):
            shapes = [tuple(part.shape) for part in parts]
            assert shapes == [(n,) for n in LENGTHS], f"one [response_length] tensor per sample; found shapes {shapes}"
            for part in parts:
                assert part.dtype == torch.float32, f"advantages and returns are float32; found {part.dtype}"
                assert bool(torch.isfinite(part).all()), f"not finite: {part.tolist()}"

    def test_a_sample_depends_on_no_other(self) -> None:
        """Check that any split of the samples gives the same result, since `advantages` sees one data-parallel rank."""
        import torch

        together = self.estimator.advantages(self.settings, _inputs()).advantages
        for position in range(len(LENGTHS)):
            alone = self.estimator.advantages(self.settings, _inputs([position])).advantages
            torch.testing.assert_close(alone[0], together[position], rtol=1e-5, atol=1e-6)

    def test_a_fully_masked_sample_is_no_trouble(self) -> None:
        """Check that results stay finite for a mask of zeros, as removed samples have."""
        import torch

        inputs = _inputs()
        inputs.loss_masks[2] = torch.zeros(LENGTHS[2])
        result = self.estimator.advantages(self.settings, inputs)
        assert all(bool(torch.isfinite(part).all()) for part in [*result.advantages, *result.returns])

    # -- loss ----------------------------------------------------------------------------------------

    def test_the_loss_has_one_value_per_token(self) -> None:
        """Check the shapes of loss and metrics, and that metrics carry no gradient."""
        import torch

        inputs = _loss_inputs(drift=0.5)
        outputs = self.estimator.policy_loss(self.settings, inputs)
        shape, expected = tuple(outputs.loss.shape), tuple(inputs.log_probs.shape)
        assert shape == expected, f"one loss per token, {expected}, which the core reduces; found {shape}"
        assert bool(torch.isfinite(outputs.loss).all()), f"not finite: {outputs.loss.tolist()}"
        for name, metric in outputs.metrics.items():
            found = tuple(metric.shape)
            assert found == expected, f"metric {name!r}: one value per token, {expected}; found {found}"
            assert not metric.requires_grad, f"metric {name!r} carries a gradient; detach it"

    def test_the_first_step_follows_the_policy_gradient(self) -> None:
        """Check that at new = old log-probs the summed loss has minus the advantage as gradient, token by token."""
        import torch

        inputs = _loss_inputs(drift=0.0)
        loss = self.estimator.policy_loss(self.settings, inputs).loss.sum()
        (gradient,) = torch.autograd.grad(loss, inputs.log_probs)
        torch.testing.assert_close(gradient, -inputs.advantages, rtol=1e-4, atol=1e-5)

    def test_the_loss_does_not_depend_on_the_micro_batch(self) -> None:
        """Check that separate samples give the same loss as one micro-batch."""
        import torch

        together = self.estimator.policy_loss(self.settings, _loss_inputs(drift=0.5)).loss
        parts = [
            self.estimator.policy_loss(self.settings, _loss_inputs(drift=0.5, samples=[i])).loss
            for i in range(len(LENGTHS))
        ]
        torch.testing.assert_close(torch.cat(parts), together, rtol=1e-5, atol=1e-6)


class AdvantageContract(EstimatorContract):
    """The same contract for `--custom-advantage-function-path`: a function on top of an estimator."""

    kind = "advantages"


_TURN_REWARDS = (1.0, 0.0, 0.5, 2.0, 2.0, 1.0)
_TURN_GROUPS = (0, 0, 0, 1, 1, 2)
_TURNS: Sequence[Sequence[tuple[float | None, str]]] = (
    [(0.0, "start"), (1.0, "door"), (0.0, "hall")],
    [(0.5, "start"), (None, "door")],
    [(None, "start")],
    [(1.0, "start"), (1.0, "start")],
    [(1.0, "start"), (1.0, "start")],
    [(0.25, "start")],
)


def _tokens(name: str, scale: float) -> list[torch.Tensor]:
    """Return per-sample tensors that depend only on the name."""
    import torch

    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return [scale * torch.rand(n, generator=generator) for n in LENGTHS]


def _masks() -> list[torch.Tensor]:
    import torch

    masks = [torch.ones(n) for n in LENGTHS]
    masks[2][2:4] = 0.0  # tool output in the middle
    return masks


def _inputs(samples: Sequence[int] = range(len(LENGTHS))) -> AdvantageInputs:
    import torch

    from slime_core.protocols import AdvantageInputs
    from slime_core.sample.provenance import TurnSpan

    turns = [[TurnSpan(0, 3)], [TurnSpan(0, 1)], [TurnSpan(0, 2), TurnSpan(4, 6)], [TurnSpan(0, 4), TurnSpan(4, 4)]]

    def pick(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [parts[i] for i in samples]

    log_probs = pick(_tokens("log_probs", -2.0))
    return AdvantageInputs(
        rewards=torch.tensor([[0.5, -1.5, 1.0, 0.0][i] for i in samples]),
        response_lengths=[LENGTHS[i] for i in samples],
        group_indices=[i // 2 for i in samples],
        rollout_ids=list(samples),
        loss_masks=pick(_masks()),
        kl=pick(_tokens("kl", 0.1)),
        log_probs=log_probs,
        rollout_log_probs=log_probs,
        ref_log_probs=pick(_tokens("ref", -2.0)),
        values=pick(_tokens("values", 0.5)),
        components=[{} for _ in samples],
        turns=[turns[i] for i in samples],
        turn_rewards=[[[0.5], [-1.5], [1.0, -0.25], [0.0, 2.0]][i] for i in samples],
        rollout_data={
            "tokens": [[1, *range(2, 2 + LENGTHS[i])] for i in samples],
            "raw_reward": [[1.0, 0.0, 1.0, 0.5][i] for i in samples],
            "truncated": [0 for _ in samples],
            "metadata": [{} for _ in samples],
            "sample_indices": list(samples),
            "total_lengths": [LENGTHS[i] + 1 for i in samples],
        },
    )


def _loss_inputs(drift: float, samples: Sequence[int] = range(len(LENGTHS))) -> LossInputs:
    import torch

    from slime_core.protocols import LossInputs

    def flat(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([parts[i] for i in samples])

    old = flat(_tokens("log_probs", -2.0))
    new = (old + drift * (flat(_tokens("drift", 1.0)) - 0.5)).requires_grad_()
    # One advantage per response, so that sequence-level ratios have the token-level gradient at the start.
    advantages = [torch.full((n,), a) for n, a in zip(LENGTHS, (1.0, -0.5, 2.0, -1.0))]
    masks = [torch.ones(n) for n in LENGTHS]
    return LossInputs(
        log_probs=new,
        old_log_probs=old,
        advantages=flat(advantages),
        loss_mask=flat(masks),
        sample_lengths=[LENGTHS[i] for i in samples],
        returns=flat(advantages),
        rollout_log_probs=old,
        ref_log_probs=flat(_tokens("ref", -2.0)),
        entropy=torch.zeros_like(old),
    )
