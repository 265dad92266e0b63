"""Tests; the folders mirror the modules they prove."""
