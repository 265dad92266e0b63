"""Pieces of the front end process that know no HTTP: channel, request state, limits, tokenizer."""
