"""Asks the workers how they are."""

import asyncio

import httpx

from serving.router.pool import Pool, WorkerStatus, reason_of


POLL_TIMEOUT = 3.0
TICK = 0.05  # how late a poll may be


async def watch(pool: Pool, client: httpx.AsyncClient) -> None:
    """Poll each worker when it is due, until cancelled."""
    async with asyncio.TaskGroup() as polls:
        while True:
            for url in pool.due():
                polls.create_task(_poll(pool, client, url))
            await asyncio.sleep(TICK)


async def ask(client: httpx.AsyncClient, url: str) -> WorkerStatus:
    """What a worker says of itself. Raises httpx.HTTPError or ValueError."""
    response = await client.get(f"{url}/disaggregation", timeout=POLL_TIMEOUT)
    response.raise_for_status()
    return WorkerStatus.model_validate_json(response.content)


async def _poll(pool: Pool, client: httpx.AsyncClient, url: str) -> None:
    asked_at = pool.clock()
    try:
        pool.heard(url, await ask(client, url), asked_at)
    except (httpx.HTTPError, ValueError) as error:
        pool.not_heard(url, f"GET /disaggregation failed: {reason_of(error)}")
