"""A cluster without a cluster: discrete events over workers whose steps take measured times."""
