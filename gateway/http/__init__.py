"""HTTP: the routes, the server's protocol with its bounds, and what all routes share."""
