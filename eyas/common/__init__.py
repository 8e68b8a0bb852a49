"""The parts that services share: configuration, errors, values, and the rooms below."""
