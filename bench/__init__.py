"""Benchmarks: `python -m bench core|alfworld|webshop` and `python -m bench.gpu_check`."""
