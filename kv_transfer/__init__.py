"""Moving KV pages between workers: handles and leases, two state machines, page maths, backends.

`owner` and `puller` decide, `copier` and `backends` move bytes, `layout` says what a page is. The package
imports neither torch, nor gRPC, nor the engine above it: the engine's loop drives the machines with its own
clock and carries their words to the wire.
"""
