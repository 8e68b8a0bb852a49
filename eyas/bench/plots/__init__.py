"""Figures of measurements, readable without colours and without the text around them."""
