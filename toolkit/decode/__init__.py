"""Decode strategies, the decode loop, sampling, and comparisons of strategies."""
