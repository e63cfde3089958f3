"""A wire between client and server that loses replies: what happens when a connection breaks at the worst time."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path


class LossyWire:
    """Forwards a unix socket. `lose` replies are thrown away with their connection, after the server has done the
    work; while `open` is cleared, replies wait."""

    def __init__(self, server_url: str, folder: Path) -> None:
        self._server = server_url.removeprefix("unix://")
        self._path = folder / "wire.sock"
        self.url = f"unix://{self._path}"
        self.lose = 0
        self.lost = 0
        self.open = asyncio.Event()
        self.open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LossyWire:
        self._listener = await asyncio.start_unix_server(self._accept, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        server_reader, server_writer = await asyncio.open_unix_connection(self._server)
        try:
            await asyncio.wait(
                {
                    asyncio.create_task(self._pump(reader, server_writer, replies=False)),
                    asyncio.create_task(self._pump(server_reader, writer, replies=True)),
                },
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            server_writer.close()
            writer.close()
            self._tasks.discard(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, replies: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if replies:
                    await self.open.wait()
                    if self.lose:
                        self.lose -= 1
                        self.lost += 1
                        return
                sink.write(data)
                await sink.drain()
