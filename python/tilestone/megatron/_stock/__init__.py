"""What `tilestone.megatron.stock` is made of, and stock Megatron-Core's errors."""
