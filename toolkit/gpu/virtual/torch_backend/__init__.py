"""The hooks that register the virtual GPU with PyTorch as the device `vgpu`."""
