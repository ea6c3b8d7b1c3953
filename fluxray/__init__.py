"""fluxray: full-parameter training of large Flux models on one 48 GB card or a group of GPUs, as a service on Ray."""

__version__ = "0.1.0"
