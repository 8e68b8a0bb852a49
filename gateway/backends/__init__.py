"""The life of a request: admitted, sent to workers, retried, delivered in order, ended."""
