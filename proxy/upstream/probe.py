"""A tiny call at start. Logs in one line what this engine captures, or what to change so that it does."""

from __future__ import annotations

import asyncio
import logging

import orjson

from capture.engines.meaning import LOGITS
from capture.engines.reader import Reader
from capture.engines.request import CaptureOptions
from capture.record import TokenCapture
from capture.sse import EventDecoder
from capture.token_in.bridge import REASONS
from proxy.errors import UpstreamError
from proxy.settings import Settings
from proxy.upstream.replicas import Replica, Replicas, first_model

log = logging.getLogger("proxy")

WIRE, PATH = "openai-chat", "/v1/chat/completions"
RETRY_INTERVAL = 5.0
_CANNOT = f"no token-in: {REASONS['engine_cannot']}; "
NO_TOKEN_IN = {
    "auto": _CANNOT + "prompts are sent as agents make them",
    "require": _CANNOT + "with --token-in require a call that goes on from an earlier one gets 422",
}


async def probe_all(replicas: Replicas, settings: Settings) -> None:
    """Probes each replica; tries again until it is up. Logs, never raises."""
    await asyncio.gather(*(_until_up(replica, settings) for replica in replicas.all))


async def _until_up(replica: Replica, settings: Settings) -> None:
    warned = False
    while True:
        try:
            good, report = await probe(replica, settings)
            log.log(logging.INFO if good else logging.WARNING, "probe: %s: %s", replica.label, report)
            if settings.token_in != "off" and replica.engine is not None and not replica.engine.takes_prompt_ids:
                log.warning("probe: %s: %s", replica.label, NO_TOKEN_IN[settings.token_in])
            return
        except UpstreamError as error:
            if not warned:
                log.warning(
                    "probe: %s: %s; calls get 502 until it answers (still loading? a wrong --upstream?), trying again",
                    replica.label,
                    error,
                )
                warned = True
            await asyncio.sleep(RETRY_INTERVAL)


async def measure_all(replicas: Replicas, model: str | None) -> None:
    """Finds out what each replica's logprobs mean; tries again until it is up. Never raises."""
    await asyncio.gather(*(_measure_once_up(replica, model) for replica in replicas.all))


async def _measure_once_up(replica: Replica, model: str | None) -> None:
    while True:
        try:
            await replica.measure_logprobs(model)
            return
        except UpstreamError:
            await asyncio.sleep(RETRY_INTERVAL)


async def probe(replica: Replica, settings: Settings) -> tuple[bool, str]:
    """A sentence about one replica, and whether all is well. Raises `UpstreamError` when it cannot be reached."""
    engine = await replica.identify()
    name = f"{engine.name} {replica.version}" if replica.version else engine.name
    if engine.name == "other":
        if replica.doubted:
            raise UpstreamError("a gateway answers, its engine does not")
        text = "no engine known to return token ids; calls are recorded with text and usage (name it with --engine)"
        status = await replica.status("/v1/models")
        if status == 200:
            return True, text
        hint = "--upstream-key" if status in (401, 403) else "--upstream"
        return False, f"{text}; GET /v1/models answered HTTP {status}: check {hint}"
    if not settings.capture:
        return True, f"{name}; capture is off"
    body = {
        "model": settings.model or first_model(await replica.get_json("/v1/models")),
        "messages": [{"role": "user", "content": "Say ok."}],
        "max_tokens": 2,
        "stream": True,
    }
    ask = engine.ask(WIRE, body, CaptureOptions(top_logprobs=settings.top_logprobs, buffered=settings.buffered))
    reader = Reader(engine, WIRE, body, ask)
    payload = orjson.dumps(ask.body)
    extra = [(key.encode(), value.encode()) for key, value in ask.headers.items()]
    response = await replica.client.send("POST", PATH, replica.auth(extra, payload), payload)
    try:
        data = await response.read()
    finally:
        response.close()
    if response.status != 200:
        hint = "check --upstream-key" if response.status == 401 else "check the engine and its model"
        return False, f"{name} answered the probe with HTTP {response.status} ({_message(data)}); {hint}"
    if ask.unstreamed:
        await replica.answer_follow_ups(engine, reader)
        reader.body(data)
    else:
        decoder = EventDecoder()
        for event in [*decoder.feed(data), *decoder.flush()]:
            if event.data and event.data != b"[DONE]":
                reader.event(event.data, event.event)
    capture = reader.capture("ok", status=200)
    await replica.measure_logprobs(settings.model)
    meaning = replica.logprobs
    return capture.complete and meaning.values != LOGITS, f"{name}: {_verdict(capture)}; logprobs: {meaning}"


def _verdict(capture: TokenCapture) -> str:
    if capture.complete:
        return "prompt ids, sampled ids and one logprob per id come back"
    missing = "; ".join(
        f"no {name.replace('_', ' ')} ({why.code}): {why.detail}" for name, why in capture.unavailable.items()
    )
    return f"capture is NOT complete: {missing}"


def _message(data: bytes) -> str:
    return " ".join(data[:200].decode("utf-8", "replace").split())
