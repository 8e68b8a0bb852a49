"""Who runs in the next step, whose turn it is, and the life of a request. Without torch."""
