"""Several GPUs that share one model: their processes, their collectives, and who holds which part."""
