"""The gateway: callers' APIs over HTTP and gRPC, and the way of their requests through the workers."""
