"""How the embedded model and its draft head are trained, from text that the repository generates."""
