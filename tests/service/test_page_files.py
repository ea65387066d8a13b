"""How the chat page's files are served."""

import aiohttp
import pytest
from aiohttp import web

from services.gateway.page import add_page


@pytest.fixture
async def address(tmp_path):
    """A server with a page of two files."""
    (tmp_path / "index.html").write_text("<p>page</p>")
    (tmp_path / "main.js").write_text("1;" * 2000)
    app = web.Application()
    add_page(app, tmp_path)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_files_are_compressed_for_those_who_take_it(address):
    """The same text, in fewer bytes, to a client that accepts gzip; plain to another."""
    async with aiohttp.ClientSession(address, auto_decompress=False) as client:
        async with client.get("/web/main.js", headers={"Accept-Encoding": "gzip, br"}) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            assert response.headers["Content-Type"].endswith("javascript; charset=utf-8")
            assert len(await response.read()) < 200
        async with client.get("/web/main.js", headers={"Accept-Encoding": ""}) as response:
            assert "Content-Encoding" not in response.headers
            assert await response.text() == "1;" * 2000


async def test_what_has_not_changed_is_not_sent_again(address):
    """A file that the client has is answered with 304 and its policy; an unknown name with 404."""
    async with aiohttp.ClientSession(address) as client:
        async with client.get("/") as response:
            etag = response.headers["ETag"]
        async with client.get("/", headers={"If-None-Match": etag}) as response:
            assert (response.status, await response.read()) == (304, b"")
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        async with client.get("/web/other.js") as response:
            assert response.status == 404
