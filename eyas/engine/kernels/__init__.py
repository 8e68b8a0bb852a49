"""GPU kernels in Triton; each is tested against plain torch."""
