"""Moves KV pages between workers: handles and leases, two state machines, page layouts, backends.

`owner` and `puller` are the protocol's state machines, `copier` and `backends` move bytes, and `layout`
defines pages. The package imports neither torch, nor gRPC, nor the engine: the engine's loop drives the state
machines with its own clock and sends their messages.
"""
