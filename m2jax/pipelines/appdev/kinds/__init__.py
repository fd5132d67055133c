"""The kinds of apps: each module has `draw(rng)`, which returns an `App`."""

from m2jax.pipelines.appdev.kinds import todo

DRAWERS = {'todo': todo.draw}
