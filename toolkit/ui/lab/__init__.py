"""The Lab (`tk.Lab`): the toolkit as an app in a notebook."""
