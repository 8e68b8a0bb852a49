"""Text: chat templates and the tokenizer on the way in, tokens made text on the way out."""
