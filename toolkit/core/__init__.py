"""What every package needs: errors, units, the registry of renderers, progress, worker processes, atomic files."""
