"""The gateway's settings."""

from __future__ import annotations

import dataclasses
import functools

from m2jax.checks import InvalidSetting, require
from m2jax.gateway import hosts, sessions
from m2jax.text import chat, invokes, markup

_POSITIVE = (
  'max_unknown_sessions', 'max_unknown_bytes', 'max_session_completions',
  'max_session_bytes', 'default_max_tokens', 'max_body_bytes', 'max_header_bytes',
  'max_connections', 'header_timeout_s', 'body_timeout_s', 'write_timeout_s', 'readers',
  'max_waiting_reads', 'read_timeout_s', 'format_timeout_s', 'keep_alive_s', 'ping_s',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GatewayConfig:
  """Settings of the gateway, with the response when a limit is exceeded.

  Attributes:
    model_name: the model served; requests for another one get a 404.
    host, port: where to listen; port 0 chooses a free port. Beyond loopback unknown
      keys cannot be accepted.
    hosts: names by which clients may call the server besides its own, as through a
      proxy on this machine; requests for other names get a 403. Beyond loopback it
      answers to every address, and to every name unless some are given here; the first
      is in the link of its trajectory page.
    accept_unknown_keys: whether an unregistered key opens a session; else it gets a
      401.
    unknown_key_mode: the mode of such a session, 'training' or 'evaluation'.
    max_unknown_sessions, max_unknown_bytes: maximum number of such sessions, and their
      total memory; the least recently used is deleted first.
    max_session_completions, max_session_bytes: maximum completions of a session that
      later requests can extend, and the memory for their token ids and digests. Above
      it, the least recently extended conversation is deleted: a request that would
      extend it forks, with the reason 'forgotten'.
    default_max_tokens: response limit of a request without one.
    restore_reasoning: whether an assistant message that comes back without its
      reasoning gets it back in the prompt (`sessions`); else the request forks.
    untrained_classes: classes of requests (`hints`) that are not part of the task: they
      are answered and recorded, but get no loss, and no later request extends them.
    template_version: 'm2', or 'm2.1' for M2.1, M2.5 and M2.7: which values of arguments
      a call can express, and where one ends (`text.invokes`).
    default_system: system text of requests without one; M2's. That of M2.5 names the
      model (docs/facts/m2-and-forge.md §2.1).
    temperature, top_p, top_k: defaults for evaluation (DESIGN §6).
    max_body_bytes: maximum size of a request; 413.
    body_overhead_bytes: maximum size of a body besides its prompt. A body larger than
      this plus 6 bytes (JSON's longest encoding of a byte) for each byte of a context
      full of the tokenizer's longest token gets a 400, code 'context_length_exceeded',
      before it is read.
    max_unfinished_bytes: total of the bodies that are arriving or waiting to be read;
      429.
    max_header_bytes: limit on the request line and headers, plus 32 per header (as in
      RFC 7541); 431.
    max_connections: above it, the connection that has been idle longest is closed, or
      the new one gets a 503.
    header_timeout_s, body_timeout_s: time for all headers of a request, from their
      first byte or the start of the connection, and for its whole body; 408.
    write_timeout_s: how long a client may leave more of a response unread than fits the
      connection's buffers, before the connection is closed.
    inline_bytes: larger bodies are read in a separate process (`readers`).
    readers: number of these processes.
    max_waiting_reads: maximum bodies waiting for a reader; 429.
    read_timeout_s, read_memory_bytes: time for one step of reading a body, and address
      space in addition to that of the process at its start; 413.
    format_timeout_s: time to compile the schema of a response_format; 400.
    keep_alive_s: how long an idle connection stays open; longer than a tool call, so
      that agents keep their connections.
    ping_s: a stream without an event for this long gets a keep-alive event, so that
      clients and proxies do not close it (Claude Code does after 300 s).
    stop_timeout_s: time that `stop` gives requests in flight.
  """

  model_name: str = 'm2jax'
  host: str = '127.0.0.1'
  port: int = 0
  hosts: tuple[str, ...] = ()
  accept_unknown_keys: bool = False
  unknown_key_mode: str = 'evaluation'
  max_unknown_sessions: int = 1024
  max_unknown_bytes: int = 1 << 30
  max_session_completions: int = 1024
  max_session_bytes: int = 64 << 20
  default_max_tokens: int = 256
  restore_reasoning: bool = True
  untrained_classes: tuple[str, ...] = ('auxiliary', 'compaction')
  template_version: str = 'm2'
  default_system: str = markup.DEFAULT_SYSTEM
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
  format_timeout_s: float = 5.0
  keep_alive_s: int = 600
  ping_s: float = 15.0
  stop_timeout_s: int = 2

  def __post_init__(self):
    check = functools.partial(require, self)
    for field in _POSITIVE:
      check(getattr(self, field) > 0, field, 'positive')
    least = self.max_body_bytes
    check(self.max_unfinished_bytes >= least, 'max_unfinished_bytes', f'>= {least}')
    least = 8 * self.max_body_bytes  # reading even plain text takes this much
    check(self.read_memory_bytes >= least, 'read_memory_bytes', f'>= {least}')
    check(self.inline_bytes >= 0, 'inline_bytes', 'at least 0')
    check(self.body_overhead_bytes >= 0, 'body_overhead_bytes', 'at least 0')
    check(0 <= self.port < 65_536, 'port', 'between 0 and 65535')
    if self.accept_unknown_keys and not hosts.is_loopback(self.host):
      raise InvalidSetting(
        f'GatewayConfig.accept_unknown_keys=True with host={self.host!r}: beyond '
        'loopback everyone who reaches the port could sample. Set '
        'accept_unknown_keys=False, and begin an episode for each client with the key '
        'in WORKDIR/keys/reward (docs/agents.md, An agent anywhere); or keep '
        "host='127.0.0.1' and put a proxy that checks its clients in front"
      )
    check(0 <= self.temperature <= 2, 'temperature', 'between 0 and 2')
    check(0 < self.top_p <= 1, 'top_p', 'in (0, 1]')
    check(self.top_k >= 0, 'top_k', 'at least 0 (0 is off)')
    versions = invokes.VERSIONS
    check(self.template_version in versions, 'template_version', f'one of {versions}')
    known = set(self.untrained_classes) <= {'auxiliary', 'compaction'}
    check(known, 'untrained_classes', "some of 'auxiliary' and 'compaction'")
    modes = sessions.MODES
    check(self.unknown_key_mode in modes, 'unknown_key_mode', f'one of {modes}')

  @property
  def template(self) -> chat.Template:
    """The template of prompts and responses."""
    return chat.Template(self.default_system, version=self.template_version)
