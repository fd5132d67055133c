"""Kernels: one folder per op, with a reference and an implementation per platform."""
