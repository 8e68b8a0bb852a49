"""Experts: the choice of each row, products grouped by expert, and their weighted sum."""
