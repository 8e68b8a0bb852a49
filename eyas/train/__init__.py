"""How draft heads are trained for a target, measured and written in the formats of others."""
