"""`tk.costs` and `tk.plan`: what a model costs and whether it fits, computed from shapes."""
