"""What `tilestone.megatron.models` is made of: tensors, fused weights, experts."""
