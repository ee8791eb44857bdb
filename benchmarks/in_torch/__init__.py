"""The model and the systems in PyTorch. Not ``torch``: a script in ``benchmarks`` would import that."""
