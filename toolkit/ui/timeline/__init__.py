"""Timelines of traces: the widget, the self-contained page, and the still picture."""
