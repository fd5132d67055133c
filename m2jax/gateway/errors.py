"""Errors of the HTTP API: an exception that becomes OpenAI's error object (law 9).

Body: `{"error": {"message", "type", "param", "code"}}`; the message names the field,
what is wrong with it and what to do.
"""

from __future__ import annotations

import functools


class ApiError(Exception):
  """An error response to a request.

  Attributes:
    status: HTTP status.
    message: for people: what is wrong, where, and what to do.
    type: OpenAI's error class, e.g. 'invalid_request_error'.
    param: path of the field, e.g. 'messages[2].role'.
    code: for programs, e.g. 'context_length_exceeded'.
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    type: str = 'invalid_request_error',
    param: str | None = None,
    code: str | None = None,
  ):
    super().__init__(message)
    self.status = status
    self.message = message
    self.type = type
    self.param = param
    self.code = code

  def __reduce__(self):  # reader processes send it
    make = functools.partial(ApiError, type=self.type, param=self.param, code=self.code)
    return make, (self.status, self.message)

  def body(self) -> dict:
    """The error object as OpenAI sends it."""
    return {
      'error': {
        'message': self.message,
        'type': self.type,
        'param': self.param,
        'code': self.code,
      }
    }


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
  """A 400: the request is invalid."""
  where = f'{param}: ' if param else ''
  return ApiError(400, where + message, param=param, code=code)


def busy(message: str) -> ApiError:
  """A 429: the request may be valid, but a limit of all requests is reached."""
  return ApiError(429, message, type='rate_limit_error', code='gateway_busy')


def too_large(message: str) -> ApiError:
  """A 413: reading the request would exceed the limits of a single request."""
  return ApiError(413, message, code='request_too_large')
