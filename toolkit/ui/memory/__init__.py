"""Pictures of memory over time: the widget, the self-contained page, and the still picture."""
