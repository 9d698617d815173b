"""How the parts of a checkpoint are saved and loaded."""
