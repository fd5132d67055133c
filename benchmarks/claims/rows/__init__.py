"""The claims: one module each, with `CLAIM`."""
