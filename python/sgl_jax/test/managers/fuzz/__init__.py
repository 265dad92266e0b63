"""Seeded fuzzing of the scheduler over real caches and a numpy device: configurations, traffic, world, oracle, shrinker."""
