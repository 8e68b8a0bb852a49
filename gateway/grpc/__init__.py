"""gRPC for callers: the service `eyas.v1.Eyas`, its messages, and the admission of calls."""
