"""The queue between agents and learner: windowed FIFO and its database."""
