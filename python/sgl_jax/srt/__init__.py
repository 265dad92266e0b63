"""The serving runtime: cache, scheduler, model executor and entry points."""
