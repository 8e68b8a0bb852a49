"""Grammars: notations, and patterns and schemas made rules that an output is held to."""
