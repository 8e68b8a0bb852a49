"""Grammars of requests: made of tools and formats, and checked in a process with limits."""
