"""Checks of the learner's answers in the lesson notebooks."""
