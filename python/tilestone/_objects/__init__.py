"""What stands in a state dict, and how it becomes the items of a checkpoint."""
