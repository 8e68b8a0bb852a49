"""Draft heads as they are trained: a file per kind, whose parameters are the tensors of its public format."""
