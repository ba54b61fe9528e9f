"""A fake of what GitHub and GitLab keep of a pull request: its comments, over HTTP."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

USER, BOT = {"type": "User"}, {"type": "Bot"}  # of GitHub; GitLab has no such field


@dataclass
class Forge:
    """Comments by order of their ids. `denies`: methods that its token may not use; `others`: ids it may not edit."""

    comments: list[dict[str, Any]] = field(default_factory=list)
    pulls: list[dict[str, Any]] = field(default_factory=list)
    files: list[dict[str, str]] = field(default_factory=list)  # of every pull request
    denies: tuple[str, ...] = ()
    others: tuple[int, ...] = ()
    asked: list[str] = field(default_factory=list)
    address: str = ""

    def add(self, body: str, **more: object) -> None:
        self.comments.append({"id": len(self.comments) + 1, "body": body, **more})

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append(f"{method} {path}")
        parts, query = urlsplit(path), parse_qs(urlsplit(path).query)
        last = parts.path.rpartition("/")[2]
        if method in self.denies or (last.isdigit() and int(last) in self.others):
            return 403, {"message": "Resource not accessible by integration"}
        if last == "pulls":
            return 200, [pull for pull in self.pulls if pull["head"]["label"] == query["head"][0]]
        if method == "GET":
            size, page = int(query["per_page"][0]), int(query["page"][0])
            return 200, (self.files if last == "files" else self.comments)[size * (page - 1) : size * page]
        if method == "POST":
            self.add(body["body"], user=BOT)
            return 201, self.comments[-1]
        self.comments[int(last) - 1]["body"] = body["body"]
        return 200, self.comments[int(last) - 1]


@contextmanager
def forge_at(forge: Forge) -> Iterator[Forge]:
    """The same with an `address` that answers."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            code, answer = forge.answer(self.command, self.path, json.loads(self.rfile.read(length) or "null"))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_GET = do_POST = do_PATCH = do_PUT = _answer  # noqa: N815  names of http.server

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    forge.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield forge
    finally:
        server.shutdown()
        server.server_close()
