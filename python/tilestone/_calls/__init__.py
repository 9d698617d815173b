"""The calls: saves, loads, sessions and open checkpoints."""
