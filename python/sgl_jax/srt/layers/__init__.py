"""Building blocks of decoder models: flax nnx modules whose parameters carry their sharding."""
