"""The model of a run's commit, for `slime export --format merged|peft|gguf` and `slime push`."""
