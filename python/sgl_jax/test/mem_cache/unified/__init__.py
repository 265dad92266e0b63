"""Worked examples of the unified tree, component by component."""
