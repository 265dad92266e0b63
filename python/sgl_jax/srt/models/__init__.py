"""Model families, their registry and the weight loader. Importing the package does not import JAX."""
