"""Budgets for copies and memory in tests: the pytest plugin, and what it measures."""
