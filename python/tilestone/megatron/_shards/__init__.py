"""What a rank holds of tensors and objects, and which rank writes or reads it."""
