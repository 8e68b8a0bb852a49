"""What a gateway shows of itself: metrics, traces, the console, and the canary."""
