"""What a model's folder says: its configuration, and its tensors on their way to a device."""
