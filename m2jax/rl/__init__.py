"""From finished rollouts to loss terms: queue, data pool, rewards, CISPO."""
