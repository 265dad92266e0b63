"""Names of speculative algorithms; the feature itself is refused at start."""
