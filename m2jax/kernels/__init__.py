"""Kernels: one folder per op, each with a reference and one implementation a backend."""
