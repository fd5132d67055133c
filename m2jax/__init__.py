"""m2jax: MiniMax-M2 and Forge, its agent-native RL system, in JAX."""
