"""`tk.memory` and `tk.budget`: who holds GPU memory, and what to do when it runs out."""
