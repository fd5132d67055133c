"""A scripted model behind the OpenAI protocol."""

from __future__ import annotations

import http.server
import json
import threading


class Server:
  """Answers with the message or the text `answer(body)`; None is an HTTP 400, a number
  that status, and bytes are all that is sent. `end` is the choice's finish_reason."""

  def __init__(self, answer, end='stop'):
    outer = self
    self.answer, self.bodies = answer, []

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['content-length'])))
        outer.bodies.append(body)
        found = outer.answer(body)
        text = found if isinstance(found, str | list) else None
        said = found if isinstance(found, dict) else {'content': text}
        reason = 'tool_calls' if said.get('tool_calls') else end
        message = {'role': 'assistant', **said}
        choice = {'index': 0, 'message': message, 'finish_reason': reason}
        usage = {'prompt_tokens': 1, 'completion_tokens': 1, 'total_tokens': 2}
        data = json.dumps({'choices': [choice], 'usage': usage}).encode()
        data = found if isinstance(found, bytes) else data
        status = found if isinstance(found, int) else 200
        self.send_response(400 if found is None else status)
        self.send_header('content-length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

      def log_message(self, *args):
        pass

    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    self.url = f'http://127.0.0.1:{self._server.server_port}/v1'

  def __enter__(self):
    serve = self._server.serve_forever
    threading.Thread(target=serve, args=(0.02,), daemon=True).start()
    return self

  def __exit__(self, *exc):
    self._server.shutdown()
    self._server.server_close()
