"""The demo models, and the script that trains them."""
