"""A worker: its front (gRPC, streams, health) in one process, its engine in another."""
