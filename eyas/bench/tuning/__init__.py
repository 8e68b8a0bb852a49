"""The fastest tiles on a GPU: `eyas tune` measures and saves them."""
