"""Plain PyTorch references of operations that several models share; models use them where no kernel runs."""
