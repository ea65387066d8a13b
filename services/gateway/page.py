"""The chat page's files: read and compressed once, then served from memory.

A phone on a slow network loads a third of the bytes. What has not changed is answered with 304, so that a new release
shows at once and an old one costs nothing.
"""

import gzip
import hashlib
import mimetypes
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # ask each time whether it changed
    "Vary": "Accept-Encoding",
}


class _File(NamedTuple):
    content_type: str
    etag: str
    plain: bytes
    packed: bytes


def add_page(app: web.Application, folder: Path) -> None:
    """Serve `folder`'s index.html at / and its files under /web/."""
    files = {path.name: _read(path) for path in sorted(folder.iterdir()) if path.is_file()}

    async def serve(request: web.Request) -> web.Response:
        file = files.get(request.match_info.get("name", "index.html"))
        if file is None:
            raise web.HTTPNotFound
        return _answer(request, file)

    app.router.add_get("/", serve)
    app.router.add_get("/web/{name}", serve)


def _read(path: Path) -> _File:
    plain = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    charset = "; charset=utf-8" if kind.startswith("text/") or kind.endswith("javascript") else ""
    etag = f'"{hashlib.sha256(plain).hexdigest()[:32]}"'
    return _File(kind + charset, etag, plain, gzip.compress(plain, mtime=0))


def _answer(request: web.Request, file: _File) -> web.Response:
    headers = {**PAGE_HEADERS, "ETag": file.etag}
    if file.etag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    headers["Content-Type"] = file.content_type
    if "gzip" not in request.headers.get("Accept-Encoding", ""):
        return web.Response(body=file.plain, headers=headers)
    return web.Response(body=file.packed, headers={**headers, "Content-Encoding": "gzip"})
