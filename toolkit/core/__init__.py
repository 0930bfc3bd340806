"""What every package needs: errors, units, the registry of renderers, progress, worker processes, files, torch.distributed."""
