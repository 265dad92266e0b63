"""Model configuration: what a checkpoint is, read from its files (no JAX)."""
