"""The gateway's settings."""

from __future__ import annotations

import dataclasses

from m2jax.gateway import sessions


@dataclasses.dataclass(frozen=True)
class GatewayConfig:
  """How the gateway listens, whom it serves and what it assumes.

  Attributes:
    model_name: the one model served; requests for another get a 404.
    host, port: where to listen; port 0 takes a free one.
    accept_unknown_keys: a key nobody registered opens a session; else it gets a 401.
    unknown_key_mode: the mode of such a session, 'training' or 'evaluation'.
    max_unknown_sessions: most of them remembered; the least recently used goes first.
    default_max_tokens: response limit of a request that names none.
    temperature, top_p, top_k: evaluation defaults (DESIGN §6).
    max_body_bytes: larger requests get a 413.
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
  default_max_tokens: int = 256
  temperature: float = 1.0
  top_p: float = 0.95
  top_k: int = 40
  max_body_bytes: int = 16 * 1024 * 1024
  keep_alive_s: int = 600
  stop_timeout_s: int = 2

  def __post_init__(self):
    def check(ok: bool, field: str, want: str):
      if not ok:
        value = getattr(self, field)
        raise ValueError(f'GatewayConfig.{field}={value!r}: must be {want}')

    for field in ('max_unknown_sessions', 'default_max_tokens', 'max_body_bytes'):
      check(getattr(self, field) > 0, field, 'positive')
    check(0 <= self.port < 65_536, 'port', 'between 0 and 65535')
    check(0 <= self.temperature <= 2, 'temperature', 'between 0 and 2')
    check(0 < self.top_p <= 1, 'top_p', 'in (0, 1]')
    check(self.top_k >= 0, 'top_k', 'at least 0 (0 is off)')
    modes = sessions.MODES
    check(self.unknown_key_mode in modes, 'unknown_key_mode', f'one of {modes}')
