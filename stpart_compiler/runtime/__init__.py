"""Running the generated programs: communication ops, rank modules, the in-process runner, checkpoints."""
