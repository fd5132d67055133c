"""Layers of the decoder as pure functions over parameter dicts."""
