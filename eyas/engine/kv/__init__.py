"""KV pages: the pool, the owners of each page, the prefix cache, leases on pages and pulls into them."""
