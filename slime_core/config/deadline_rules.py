"""Rules of deadlines: what is said about groups that hang needs a deadline after which they do (`rules.RULES`)."""

from __future__ import annotations

from slime_core.config.settings import Settings


def group_deadline(s: Settings) -> None:
    """A policy without `--group-timeout`, or of another policy, has no effect."""
    if s.args.group_timeout is None:
        for name in ("group_timeout_policy", "group_timeout_retries"):
            if s.is_given(name):
                s.warnings.append(f"{s.cite(name)} has no effect without --group-timeout.")
    elif s.args.group_timeout_policy != "retry" and s.is_given("group_timeout_retries"):
        s.warnings.append(f"{s.cite('group_timeout_retries')} has no effect without --group-timeout-policy retry.")
