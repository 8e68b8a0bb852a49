"""Measuring Eyas, or any server that speaks OpenAI's completions: load cases, a client, figures."""
