"""Bytes between a prefill and a decode process that harm neither."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import struct
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax import frames
from m2jax.rollout.disaggregation import connection, handover, prefill_server
from m2jax.rollout.disaggregation.prefill_engine import PrefillScheduler
from m2jax.rollout.disaggregation.prefill_server import PrefillServer
from m2jax.rollout.disaggregation.remote_prefill import RemotePrefills
from tests.rollout.conftest import CFG, RECORDING
from tests.rollout.disaggregation.test_disaggregated import HOW
from tests.rollout.disaggregation.test_remote_prefill import LAYOUT, QUICK, decode, path
from tests.rollout.engine.test_engine import prompt
from tests.rollout.serving.test_scheduler import assert_logprobs, request, run
from tests.waiting import wait_until

__all__ = ['decode', 'path']  # fixtures


def opened(server, key=None):
  sock = connection.Address.parse(server.address).connect(5.0)
  connection.open_client(sock, key, 5.0)
  return sock


def closes(sock) -> bool:
  """Whether the other side closes it, after whatever it still sends."""
  sock.settimeout(5.0)
  try:
    while sock.recv(1 << 16):
      pass
  except ConnectionError:
    pass
  except TimeoutError:
    return False
  return True


def frame(
  header, body=b'', *, magic=b'm2f1', header_bytes=None, body_bytes=None, arrays=None
):
  """`arrays`: as the header says they are in the body; None: tokens alone."""
  if not isinstance(header, bytes):
    if arrays is None and body:
      arrays = dict(tokens=('int32', [len(body) // 4]))
    header = dict(header, arrays=arrays) if arrays else header
  head = header if isinstance(header, bytes) else json.dumps(header).encode()
  sizes = (
    len(head) if header_bytes is None else header_bytes,
    len(body) if body_bytes is None else body_bytes,
  )
  return struct.pack('>4sIQ', magic, *sizes) + head + body


ASK = dict(kind='ask', number=1, first_page=0, version=0)
TOKENS = np.arange(9, dtype=np.int32).tobytes()
HOSTILE = {
  'http': b'GET / HTTP/1.1\r\nHost: x\r\n\r\n',
  'magic': frame(dict(kind='ping'), magic=b'm2h1'),
  'huge header': frame(b'', header_bytes=2**31),
  'huge body': frame(ASK, body_bytes=2**63),
  'body of one token more': frame(ASK, body_bytes=4 * RECORDING.context_tokens + 4),
  'no json': frame(b'{"kind": '),
  'no object': frame(b'[1]'),
  'no kind': frame(b'{}'),
  'deep': frame(b'[' * 16_000),
  'unknown': frame(dict(kind='exec')),
  'no text': frame(b'\xff\xfe'),
  'half a token': frame(ASK, TOKENS[:-1]),
  'no tokens': frame(ASK),
  'one token': frame(ASK, TOKENS[:4]),
  'token out of range': frame(ASK, np.int32([1, CFG.vocab_size]).tobytes()),
  'negative token': frame(ASK, np.int32([1, -1]).tobytes()),
  'first page': frame({**ASK, 'first_page': 2}, TOKENS),
  'negative page': frame({**ASK, 'first_page': -1}, TOKENS),
  'huge page': frame({**ASK, 'first_page': 2**80}, TOKENS),
  'boolean': frame({**ASK, 'number': True}, TOKENS),
  'no number': frame(dict(kind='cancel')),
  'nan': frame(b'{"kind": "weights", "version": NaN}'),
  'no arrays': frame({**ASK, 'arrays': [1]}),
  'array of objects': frame(ASK, TOKENS, arrays=dict(tokens=('object', [9]))),
  'array of a petabyte': frame(ASK, TOKENS, arrays=dict(tokens=('int32', [2**48]))),
  'negative array': frame(ASK, TOKENS, arrays=dict(tokens=('int32', [-9]))),
  'array of another type': frame(ASK, TOKENS, arrays=dict(tokens=('float32', [9]))),
  'array of two axes': frame(ASK, TOKENS, arrays=dict(tokens=('int32', [3, 3]))),
  'more than its arrays': frame(ASK, TOKENS, arrays=dict(tokens=('int32', [8]))),
  'twice': frame({**ASK, 'version': 9}, TOKENS) * 2,
}


@pytest.fixture(scope='module')
def attacked(recording, variables, tmp_path_factory):
  scheduler = PrefillScheduler(recording, variables, part_pages=3)
  path = tmp_path_factory.mktemp('socket') / 's'
  limits = prefill_server.Limits(frame_s=0.5, silence_s=1.0, connections=4, asks=8)
  server = PrefillServer(
    scheduler, f'unix:{path}', load=lambda v: variables, limits=limits
  ).start(warmup=False)
  yield server
  source = RemotePrefills(server.address, LAYOUT, timeouts=QUICK).start()
  found = []
  source.ask(handover.Ask(np.array(prompt(1, 9), np.int32), 0, 0), found.append)
  wait_until(lambda: found)  # it serves as ever
  assert isinstance(found[0], handover.Part)
  source.stop()
  wait_until(lambda: not server.stats()['connections'])
  wait_until(lambda: not server.stats()['queue_length'])  # asks of closed connections
  stats = server.stats()
  assert stats['queue_length'] == stats['active_slots'] == stats['failed'] == 0
  assert stats['free_pages'] + stats['cached_pages'] == stats['pages']
  server.stop()


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_frames_close_their_own_connection(attacked, name):
  with opened(attacked) as sock:
    before = attacked.rejected
    sock.sendall(HOSTILE[name])
    assert closes(sock)
    wait_until(lambda: attacked.rejected == before + 1)


@given(st.data())
def test_damaged_frames_do_no_harm(attacked, data):
  """A good ask with bytes replaced, cut off or added."""
  found = bytearray(frame(ASK, TOKENS))
  for _ in range(data.draw(st.integers(1, 4))):
    found[data.draw(st.integers(0, len(found) - 1))] = data.draw(st.integers(0, 255))
  found = bytes(found[: data.draw(st.integers(0, len(found)))])
  with opened(attacked) as sock:
    sock.sendall(found + data.draw(st.binary(max_size=20)))
    sock.shutdown(socket.SHUT_WR)
    assert closes(sock)


def test_bytes_before_the_key(attacked):
  """Of the opening only small frames are read, for a bounded time."""
  for junk in (b'\0' * 64, frame(dict(kind='challenge'), b'body'), b''):
    sock = connection.Address.parse(attacked.address).connect(5.0)
    sock.sendall(junk)
    assert closes(sock)  # after the challenge


@pytest.mark.parametrize('field', ['nonce', 'mac'])
def test_text_that_has_no_bytes(field):
  """JSON may have a lone surrogate, which cannot be signed."""
  made = frames.decode(frames.pack('challenge', **{field: '\ud800'}))
  with pytest.raises(frames.Malformed, match=field):
    made.ascii_text(field)


def test_slow_and_silent_connections_are_closed(attacked):
  with opened(attacked) as sock:
    begin = time.monotonic()
    sock.sendall(b'm2')  # half a prefix
    assert closes(sock) and time.monotonic() - begin < 30
  with opened(attacked) as sock:
    assert closes(sock)


def test_connections_and_asks_are_bounded(attacked):
  wait_until(lambda: not attacked.stats()['connections'])
  with contextlib.ExitStack() as stack:
    for _ in range(4):
      sock = stack.enter_context(opened(attacked))
    more = connection.Address.parse(attacked.address).connect(5.0)
    assert closes(more)
    for number in range(9):  # of weights that never come
      sock.sendall(frame({**ASK, 'number': number, 'version': 99}, TOKENS))
    assert closes(sock)
  wait_until(lambda: not attacked.stats()['connections'])


def test_a_receiver_that_does_not_read_is_disconnected():
  """Its parts would fill the memory."""
  ours, theirs = socket.socketpair()
  bounds = dict(max_body_bytes=10, max_unsent_bytes=10_000_000, timeout_s=30.0)
  channel = connection.Channel(ours, **bounds)
  for number in range(11):
    channel.send('part', dict(k=np.zeros(1_000_000, np.uint8)))
    assert number > 8 or not channel.closed
  assert channel.closed
  channel.join()
  theirs.close()


class Impostor:
  """A prefill process that answers every ask with `answer(number, tokens)`."""

  def __init__(self, path, answer, **hello):
    self._socket = connection.Address.parse(path).listen(None)
    self._answer = answer
    self._hello = dict(layout=LAYOUT, run_id='', version=0) | hello
    threading.Thread(target=self._run, daemon=True).start()

  def _run(self):
    while True:
      try:
        sock, _ = self._socket.accept()
      except OSError:
        return
      with contextlib.suppress(OSError, frames.Malformed), sock:
        connection.open_server(sock, None, self._hello, 5.0)
        while True:
          found = frames.receive(sock, 10_000, 60.0)
          if found.kind == 'ask':
            tokens = found.arrays['tokens']
            sock.sendall(self._answer(found.fields['number'], tokens))

  def close(self):
    self._socket.shutdown(socket.SHUT_RDWR)
    self._socket.close()


def part(number, tokens, *, k=0.0, expert=0, change=None, cut=0, **header):
  """The frame of a prompt of 9 tokens: two pages."""
  named = handover.shapes(LAYOUT, 2)._asdict().items()
  arrays = {name: (x[1].name, x[0]) for name, x in named if x is not None}
  pages = [np.zeros(shape, dtype) for dtype, shape in arrays.values()]
  pages[0][-1, -1, -1, -1, -1] = k
  pages[2].reshape(-1)[:8] = tokens[:8]
  pages[3].reshape(-1)[-1] = expert
  if change:
    pages[2].reshape(-1)[3] = change
  body = b''.join(x.tobytes() for x in pages)
  fields = dict(kind='part', number=number, first_page=0, held=8)
  fields |= dict(oldest=0, newest=0, pages=2) | header
  return frame(fields, body[: len(body) - cut], arrays=arrays)


FALSE = {
  'nan': dict(k=np.nan),
  'infinite': dict(k=np.inf),
  'expert': dict(expert=CFG.num_experts),
  'negative expert': dict(expert=-2),
  'token': dict(change=-5),
  'short': dict(cut=1),
  'no pages': dict(pages=0),
  'many pages': dict(pages=4),
  'older weights': dict(oldest=-1),
  'weights of no version': dict(newest=2**31),
  'weights of an absurd version': dict(newest=2**80),
  'order': dict(oldest=1),
  'one version': dict(newest=None),
  'text': dict(held='8'),
  'float': dict(first_page=0.0),
  'negative': dict(held=-8),
}


@pytest.mark.parametrize('name', FALSE)
def test_a_false_prefill_process_is_disconnected(
  decode, path, variables, reference, name
):
  """Before anything that it sent has reached the engine."""
  impostor = Impostor(path, lambda n, tokens: part(n, tokens, **FALSE[name]))
  front = decode(path)
  tokens = prompt(1, 9)
  result = run(front, request(tokens))
  assert_logprobs(reference, variables, tokens, result)
  stats = front.stats()
  assert stats['prefill_engine_protocol_errors'] == stats['prefills_alone'] == 1
  assert stats['handover_pages'] == 0
  impostor.close()


@pytest.mark.parametrize('newest', [1, 2**31 - 1])
def test_newer_weights_are_not_used(decode, path, variables, reference, newest):
  """Be they another engine's, or false: nothing more is asked of that process."""
  impostor = Impostor(path, lambda n, tokens: part(n, tokens, newest=newest))
  front = decode(path)
  for i in range(2):
    tokens = prompt(1 + i, 9)
    assert_logprobs(reference, variables, tokens, run(front, request(tokens)))
  stats = front.stats()
  assert stats['handover_newer'] == 1 and stats['prefills_alone'] == 2
  assert stats['handover_pages'] == stats['prefill_engine_protocol_errors'] == 0
  assert stats['prefill_engine_connected'] and stats['prefill_engine_ahead']
  impostor.close()


def test_parts_of_the_wrong_tokens_or_nobody(decode, path, variables, reference):
  """These are of the right form: the batcher refuses them, or nobody waits for them."""
  kinds = iter([dict(change=60), dict(number=77), dict()])

  def answer(number, tokens):
    return part(**dict(number=number, tokens=tokens) | next(kinds)) + frame(
      dict(kind='failed', number=number, reason='x' * 10_000)
    )

  impostor = Impostor(path, answer)
  front = decode(path)
  for i in range(2):
    tokens = prompt(1 + i, 9)
    assert_logprobs(reference, variables, tokens, run(front, request(tokens)))
  assert front.stats()['handover_failures'] == 2
  assert run(front, request(prompt(4, 9))).tokens.size == 6  # zeros, but pages
  stats = front.stats()
  assert stats['handovers'] == 1 and stats['prefill_engine_protocol_errors'] == 0
  impostor.close()


def test_a_process_that_hangs(decode, path, variables, reference):
  """It takes asks and answers nothing: given up, and not asked again for a while."""
  impostor = Impostor(path, lambda number, tokens: b'')
  how = dataclasses.replace(HOW, timeout_s=0.3)
  timeouts = dataclasses.replace(QUICK, avoid_s=600.0)
  front = decode(path, how=how, timeouts=timeouts)
  for i in range(2):
    tokens = prompt(i, 20)
    assert_logprobs(reference, variables, tokens, run(front, request(tokens)))
  stats = front.stats()
  assert stats['handover_timeouts'] == 1 and stats['prefills_alone'] == 2
  impostor.close()
