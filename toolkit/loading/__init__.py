"""`tk.load` and `tk.quantize`: from a checkpoint to a model on a device."""
