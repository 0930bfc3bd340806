"""Weight files (safetensors, GGUF, GPTQ, AWQ, HQQ), quantization schemes, and the packed layout."""
