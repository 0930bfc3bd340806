"""Tokenizers, chat templates, and prompts."""
