"""Run plain rewards in worker processes: the pool (entry point `reward_processes` of `slime.api`) and its workers."""

__all__: list[str] = []
