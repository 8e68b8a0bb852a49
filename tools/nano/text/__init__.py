"""The generated training text: one topic per file, and the dialogues that are made of them."""
