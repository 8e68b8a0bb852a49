"""What a gateway alone costs, and what the benchmark's own client does."""
