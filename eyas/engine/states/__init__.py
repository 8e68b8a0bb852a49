"""States of layers that have one instead of keys and values: their shape, and the equations that move it."""
