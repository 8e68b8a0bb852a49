"""The build of the embedded model, its head and its held-out questions, from text made here."""
