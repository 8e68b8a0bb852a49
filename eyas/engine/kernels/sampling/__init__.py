"""The choice of a token on the device: noise, filters, penalties and log-probabilities."""
