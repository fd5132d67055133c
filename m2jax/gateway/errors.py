"""Errors of the HTTP API: exceptions that each dialect writes in its own form (law 9).

The message names the field, what is wrong with it and what to do. `ApiError.body` is
OpenAI's form: `{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

import functools


class ApiError(Exception):
  """An error response to a request.

  Attributes:
    status: HTTP status.
    message: text for people: what is wrong, where, and what to do.
    type: OpenAI's error class, e.g. 'invalid_request_error'.
    param: path of the field, e.g. 'messages[2].role'.
    code: code for programs, e.g. 'context_length_exceeded'.
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

  @property
  def retry_after_s(self) -> int | None:
    """When to try again, in whole seconds; None if that would not help."""
    return 1 if self.status in (429, 503) else None

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

  def any_body(self) -> dict:
    """An error object for clients of all dialects, where the dialect is not known."""
    return {'type': 'error', **self.body()}


class ContextTooLong(ApiError):
  """A 400: the prompt cannot fit into the context.

  The message is OpenAI's: clients recognise it by its wording, and shorten the history
  instead of trying again (litellm: "maximum context length is").

  Attributes:
    what: is too long; a clause.
    context_tokens: size of the engine's context.
    prompt_tokens: tokens of the prompt, or a lower bound; None if it was not encoded.
  """

  def __init__(self, what: str, context_tokens: int, prompt_tokens: int | None = None):
    super().__init__(
      400,
      f"This model's maximum context length is {context_tokens} tokens. However, "
      f'{what}. Please reduce the length of the messages.',
      param='messages',
      code='context_length_exceeded',
    )
    self.what = what
    self.context_tokens = context_tokens
    self.prompt_tokens = prompt_tokens

  def __reduce__(self):
    return ContextTooLong, (self.what, self.context_tokens, self.prompt_tokens)


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
  """A 400: the request is invalid."""
  where = f'{param}: ' if param else ''
  return ApiError(400, where + message, param=param, code=code)


def unsupported(message: str, param: str) -> ApiError:
  """A 400: a field is valid for the real service, but this one cannot honour it."""
  return invalid(message, param, 'unsupported_parameter')


def busy(message: str) -> ApiError:
  """A 429: the request may be valid, but a limit of all requests is reached."""
  return ApiError(429, message, type='rate_limit_error', code='gateway_busy')


TOO_LARGE = 413


def too_large(message: str) -> ApiError:
  """A 413: reading the request would exceed the limits of a single request."""
  return ApiError(TOO_LARGE, message, code='request_too_large')
