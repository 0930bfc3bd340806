"""`tk.export` and `tk.load_exported`: packages compiled ahead of time under a memory budget."""
