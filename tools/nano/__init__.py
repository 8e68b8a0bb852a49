"""How the embedded model, its head and its held-out questions are made, from text made here."""
