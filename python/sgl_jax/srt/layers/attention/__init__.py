"""Paged attention: block metadata (numpy), the ``native`` backend (plain JAX), a dense reference for tests."""
