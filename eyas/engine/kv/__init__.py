"""KV pages: the pool, who owns which page, the prefix cache, leases on pages and pulls into them."""
