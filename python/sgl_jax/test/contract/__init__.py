"""The seam, poked the way sglang-jax's own unit tests poke it: real pools on a mesh, fakes that lack fields, fabricated slots."""
