"""The messages between an engine and its front, and both ends of the link that carries them."""
