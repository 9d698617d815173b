"""torch's tensors, devices and process groups. Imported once torch is."""
