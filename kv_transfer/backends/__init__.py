"""Backends only move bytes; the protocol around them is `owner` and `puller`, once for all of them."""
