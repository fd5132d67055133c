"""Replicas that are made again in place of those that have stopped."""

import threading

from m2jax.rollout.routing.restarts import Restarts


def test_a_replica_that_is_lost_again_while_it_is_made():
  """The thread of the first loss ends last; the second is still awaited."""
  first, second, ended, makers = threading.Event(), threading.Event(), [], []
  lost_again = threading.Event()

  def make(number):
    makers.append(threading.current_thread())
    if not ended:
      ended.append('first')
      restarts.begin(number, 'lost again')  # as soon as it serves
      lost_again.set()
      assert first.wait(30)
    else:
      assert second.wait(30)
      ended.append('second')

  restarts = Restarts(make, most=1, delay_s=0.0)
  restarts.begin(0, 'lost')
  assert lost_again.wait(30)
  first.set()
  makers[0].join(30)
  assert restarts.pending and restarts.reasons == {0: 'lost again'}
  second.set()
  restarts.wait()
  assert not restarts.pending and ended == ['first', 'second'] and not restarts.reasons
