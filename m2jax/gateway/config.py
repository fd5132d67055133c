"""The gateway's settings."""

from __future__ import annotations

import dataclasses
import functools

from m2jax.checks import require
from m2jax.gateway import sessions

_POSITIVE = (
  'max_unknown_sessions', 'max_unknown_bytes', 'max_session_completions',
  'max_session_bytes', 'default_max_tokens', 'max_body_bytes', 'max_header_bytes',
  'max_connections', 'header_timeout_s', 'body_timeout_s', 'write_timeout_s', 'readers',
  'max_waiting_reads', 'read_timeout_s', 'keep_alive_s',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GatewayConfig:
  """How the gateway listens, whom it serves and what it assumes.

  Attributes:
    model_name: the one model served; requests for another get a 404.
    host, port: where to listen; port 0 takes a free one.
    accept_unknown_keys: a key nobody registered opens a session; else it gets a 401.
    unknown_key_mode: the mode of such a session, 'training' or 'evaluation'.
    max_unknown_sessions, max_unknown_bytes: most of them remembered, and what they may
      keep together; the least recently used is forgotten first.
    max_session_completions, max_session_bytes: most completions of a session that later
      requests can extend, and the bytes of token ids and digests kept for that. Beyond,
      its least recently extended conversation is forgotten: a request that would extend
      it forks, with the reason 'forgotten'.
    default_max_tokens: response limit of a request that names none.
    temperature, top_p, top_k: evaluation defaults (DESIGN §6).
    max_body_bytes: larger requests get a 413.
    body_overhead_bytes: what a body may hold beside its prompt. A body larger than this
      and 6 bytes (JSON's longest spelling of a byte) for each byte of a context full of
      the tokenizer's longest token gets a 400, code 'context_length_exceeded', before
      it is read.
    max_unfinished_bytes: of bodies that arrive or wait to be read, together; beyond, a
      429.
    max_header_bytes: of the request line and headers, 32 more for each header (as RFC
      7541 counts); beyond, a 431.
    max_connections: beyond, the connection that has idled longest is closed, or the new
      one gets a 503.
    header_timeout_s, body_timeout_s: for all of a request's headers, from their first
      byte or the connection's start, and for all of its body; beyond, a 408.
    write_timeout_s: how long a client may leave more of its response unread than the
      connection buffers; then it is closed.
    inline_bytes: larger bodies are read in a process of their own (`readers`).
    readers: number of such processes.
    max_waiting_reads: bodies that wait for one; beyond, a 429.
    read_timeout_s, read_memory_bytes: what one step of reading a body may take: time,
      and address space beyond what its process has at the start; beyond, a 413.
    keep_alive_s: how long an idle connection stays open; longer than a tool call runs,
      so that agents keep theirs.
    stop_timeout_s: how long `stop` lets requests in flight end.
  """

  model_name: str = 'm2jax'
  host: str = '127.0.0.1'
  port: int = 0
  accept_unknown_keys: bool = False
  unknown_key_mode: str = 'evaluation'
  max_unknown_sessions: int = 1024
  max_unknown_bytes: int = 1 << 30
  max_session_completions: int = 1024
  max_session_bytes: int = 64 << 20
  default_max_tokens: int = 256
  temperature: float = 1.0
  top_p: float = 0.95
  top_k: int = 40
  max_body_bytes: int = 16 << 20
  body_overhead_bytes: int = 1 << 20
  max_unfinished_bytes: int = 64 << 20
  max_header_bytes: int = 32 << 10
  max_connections: int = 512
  header_timeout_s: float = 10.0
  body_timeout_s: float = 60.0
  write_timeout_s: float = 60.0
  inline_bytes: int = 16 << 10
  readers: int = 1
  max_waiting_reads: int = 64
  read_timeout_s: float = 30.0
  read_memory_bytes: int = 2 << 30
  keep_alive_s: int = 600
  stop_timeout_s: int = 2

  def __post_init__(self):
    check = functools.partial(require, self)
    for field in _POSITIVE:
      check(getattr(self, field) > 0, field, 'positive')
    least = self.max_body_bytes
    check(self.max_unfinished_bytes >= least, 'max_unfinished_bytes', f'>= {least}')
    least = 8 * self.max_body_bytes  # what even a plain text takes to be read
    check(self.read_memory_bytes >= least, 'read_memory_bytes', f'>= {least}')
    check(self.inline_bytes >= 0, 'inline_bytes', 'at least 0')
    check(self.body_overhead_bytes >= 0, 'body_overhead_bytes', 'at least 0')
    check(0 <= self.port < 65_536, 'port', 'between 0 and 65535')
    check(0 <= self.temperature <= 2, 'temperature', 'between 0 and 2')
    check(0 < self.top_p <= 1, 'top_p', 'in (0, 1]')
    check(self.top_k >= 0, 'top_k', 'at least 0 (0 is off)')
    modes = sessions.MODES
    check(self.unknown_key_mode in modes, 'unknown_key_mode', f'one of {modes}')
