"""What test servers share: whole answers, and no log."""

import http.server


class Answering(http.server.BaseHTTPRequestHandler):
    """Handles a request by one call of `answer`."""

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass
