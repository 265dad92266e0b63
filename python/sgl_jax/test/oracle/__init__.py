"""Independent oracle of the cache: written from RFC-0035, its decisions and fault list, never from the code under test.

Everything here is deliberately naive: dictionaries of single slots, lists, quadratic loops. Nothing imports the
allocator, the tree or the caches; only :mod:`observe` reads their public structure.
"""
