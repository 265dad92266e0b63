"""Runs the model: mesh, memory budget, step inputs, compiled steps, sampler and worker."""
