"""The kinds of apps: each module has `draw(rng)`, which returns an `App`."""

from m2jax_pipelines.appdev.kinds import (
  board,
  calculator,
  cart,
  converter,
  counter,
  form,
  quiz,
  table,
  timer,
  todo,
)

_MODULES = (todo, converter, table, calculator, form)
_MODULES += (timer, quiz, board, cart, counter)
DRAWERS = {module.__name__.rpartition('.')[2]: module.draw for module in _MODULES}
