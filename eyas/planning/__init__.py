"""`eyas plan`: the number of workers that a load needs, and their layout."""
