"""Small helpers shared by the runtime."""
