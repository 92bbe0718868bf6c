"""Cost models: clusters as data, and the time and memory of compute, communication and whole programs."""
