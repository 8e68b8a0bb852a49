"""gRPC between services: channels, typed clients, and the conversion of messages."""
