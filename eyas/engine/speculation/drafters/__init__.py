"""Drafters of a decode engine: a head beside the model, a lookup, or a draft worker elsewhere."""
