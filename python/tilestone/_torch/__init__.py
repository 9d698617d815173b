"""torch's tensors, devices and process groups. Only `parts` and `transfer` are imported without torch."""
