"""vLLM's servers as a rollout engine."""
