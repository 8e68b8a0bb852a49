"""Reads answers: their reasoning and their calls of tools, by one file per format (`table` names all)."""
