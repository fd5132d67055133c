"""Windowed FIFO and the database behind it: between the agents and the learner."""
