"""Several GPUs: `tk.cluster` opens one process per rank and runs functions on all of them."""
