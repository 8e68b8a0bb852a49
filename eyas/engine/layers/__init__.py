"""What models are made of in plain torch: products, norms, rotation, activations, experts."""
