"""What services share: configuration, errors, values, and the rooms below."""
