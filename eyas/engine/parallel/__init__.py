"""Several GPUs that share one model: their processes, their collectives, and which rank holds which part."""
