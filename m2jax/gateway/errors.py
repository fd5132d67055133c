"""Errors of the HTTP dialect: one exception that becomes OpenAI's error object (law 9).

Body: `{"error": {"message", "type", "param", "code"}}`; the message names the field,
says what was wrong and what to do.
"""

from __future__ import annotations


class ApiError(Exception):
  """A request that gets an error answer and costs nothing else.

  Attributes:
    status: HTTP status.
    message: for a person: what was wrong, where, what to do.
    type: OpenAI's error class, e.g. 'invalid_request_error'.
    param: the offending field, dotted, e.g. 'messages[2].role'.
    code: for a program, e.g. 'context_length_exceeded'.
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
  """A 400: the request itself is at fault."""
  where = f'{param}: ' if param else ''
  return ApiError(400, where + message, param=param, code=code)
