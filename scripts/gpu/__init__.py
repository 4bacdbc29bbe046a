"""`scripts/gpu_check`: what can only be known on a GPU, in stages, with one page of results."""
