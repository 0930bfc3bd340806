"""Everything that a notebook displays. The only package that imports Jupyter."""
