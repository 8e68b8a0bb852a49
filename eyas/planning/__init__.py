"""How many workers a load needs, and in which layout: the answers of `eyas plan`."""
