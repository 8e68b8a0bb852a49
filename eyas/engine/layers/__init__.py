"""Parts of models in plain torch: products, norms, rotation, activations, routing."""
