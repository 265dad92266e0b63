"""HTTP servers and the in-process engine."""
