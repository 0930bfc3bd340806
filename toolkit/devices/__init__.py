"""Devices: run things and write a trace."""
