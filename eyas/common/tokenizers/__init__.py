"""Tokenizers in whichever form a model publishes them, and what each id writes."""
