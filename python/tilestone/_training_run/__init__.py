"""The checkpoints of a training run: the manager, its saves and the scheduler's signal."""
