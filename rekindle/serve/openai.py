"""The wire form of OpenAI for language models: completions and chats, whole or streamed as
server-sent events.

Settings that the model honours are taken, others refused. Without `temperature` the most probable
token is written. Authority: OpenAI's API reference, "Completions" and "Chat"."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import AliasChoices, Field, model_validator
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from rekindle.serve.wire import JSON, Body, dumped, read, read_body
from rekindle.serve.work import MOST_TOKENS, Options, RefusedError, Work

if TYPE_CHECKING:
    from rekindle.serve.inputs import Inputs
    from rekindle.serve.server import Reread, Server

_LIMITS = AliasChoices("max_tokens", "max_completion_tokens")


class _Asked(Body):
    model: str
    max_tokens: int = Field(64, ge=1, le=MOST_TOKENS, validation_alias=_LIMITS)
    temperature: float = 0.0
    seed: int | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] | None = None
    n: int = Field(1, ge=1, le=1)

    @model_validator(mode="before")
    @classmethod
    def _said(cls, asked: Any) -> Any:
        """What is null is left out, whatever it is, as in OpenAI's own clients."""
        said = asked.items() if isinstance(asked, dict) else ()
        return {name: value for name, value in said if value is not None} if said else asked


class Completion(_Asked):
    """`POST /v1/completions`."""

    prompt: str


class Chat(_Asked):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]


async def answered(server: Server, kind: type[Completion | Chat], request: Request) -> Response:
    """A text goes on, or the assistant answers."""
    asked = read(kind, await read_body(request))
    if asked.model != server.model.name:
        what = f"there is no model `{asked.model}`: this is {server.model.name}"
        raise RefusedError(404, what, "unknown_model")
    reread = functools.partial(_contents, asked)
    (content,), options = reread(server.inputs)
    head = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": asked.model}
    head["object"] = "chat.completion" if kind is Chat else "text_completion"
    if asked.stream:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        pieces: asyncio.Queue[int | None] = asyncio.Queue()
        work, began = Work(content, options, answer, pieces), time.perf_counter()
        server.waiting.put([work])
        watching = server.watch(request, [work])
        first = await pieces.get()  # what fails before it is answered as any other request is
        watching.cancel()
        if first is None and isinstance(refused := await answer, RefusedError):
            if work.gone:
                raise ClientDisconnect
            server.judge([refused])
            raise refused
        texts, usage = _texts(server, pieces, first), asked.stream_options or {}
        events = _events(server, request, work, texts, began, head, usage, reread)
        return StreamingResponse(events, media_type="text/event-stream")
    (found,) = await server.predictions(request, [content], options, reread)
    head |= {"truncated": True} if "truncated" in found else {}
    message = {"role": "assistant", "content": found["text"]}
    one = {"message": message} if kind is Chat else {"text": found["text"]}
    whole = {**_choice(head, one, found["finish_reason"]), "usage": _usage(found)}
    return Response(dumped(whole), media_type=JSON)


def _contents(asked: Completion | Chat, inputs: Inputs) -> tuple[list[Any], Options]:
    """What is asked of a model with these inputs. Raises RefusedError where it answers
    elsewhere."""
    is_chat = isinstance(asked, Chat)
    if not inputs.form or (inputs.form == "chat") != is_chat:
        hint = {"": "/predict", "chat": "/v1/chat/completions"}.get(inputs.form, "/v1/completions")
        raise RefusedError(400, f"this model does not answer here: ask {hint}")
    content = asked.messages if isinstance(asked, Chat) else asked.prompt
    settings = {"max_new_tokens": asked.max_tokens, "temperature": asked.temperature}
    options = read(Options, dumped({**settings, "seed": asked.seed}))
    return inputs.contents([{inputs.column: content}]), options


def listed(server: Server, path: str) -> dict[str, Any]:
    """`GET /v1/models`, and of one of them."""
    model = {"id": server.model.name, "object": "model", "created": 0, "owned_by": "rekindle"}
    return {"object": "list", "data": [model]} if path == "/v1/models" else model


def error_of(error: RefusedError) -> dict[str, Any]:
    """A refusal as OpenAI's clients read it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.reason}}


def _choice(head: dict[str, Any], one: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {**head, "choices": [{"index": 0, "finish_reason": reason, "logprobs": None, **one}]}


def _usage(found: dict[str, Any]) -> dict[str, int]:
    counts = {"prompt_tokens": found["prompt_tokens"], "completion_tokens": found["tokens"]}
    return {**counts, "total_tokens": sum(counts.values())}


async def _events(
    server: Server,
    request: Request,
    work: Work,
    texts: AsyncIterator[str],
    began: float,
    head: dict[str, Any],
    options: Mapping[Any, bool],
    reread: Reread,
) -> AsyncIterator[bytes]:
    assert work.answer is not None
    chat = head["object"] == "chat.completion"
    head |= {"object": "chat.completion.chunk"} if chat else {}

    def event(text: str, reason: str | None = None, **role: str) -> bytes:
        one = {"delta": {**role, "content": text}} if chat else {"text": text}
        return b"data: " + dumped(_choice(head, one, reason)) + b"\n\n"

    server.accepted += 1
    try:
        if chat:
            yield event("", role="assistant")
        async for text in texts:
            yield event(text)
        found = await work.answer
        server.judge([found])
        if isinstance(found, RefusedError):
            server.figures.refused.labels(found.reason).inc()
            yield b"data: " + dumped(error_of(found)) + b"\n\n"
        else:
            head |= {"truncated": True} if "truncated" in found else {}
            yield event("", found["finish_reason"])
            if options.get("include_usage"):
                usage = {**head, "choices": [], "usage": _usage(found)}
                yield b"data: " + dumped(usage) + b"\n\n"
            yield b"data: [DONE]\n\n"
            server.note(request, [work], [found], time.perf_counter() - began, reread)
    finally:
        server.accepted -= 1
        status = getattr(work.answer.result(), "status", 200) if work.answer.done() else 499
        taken = server.figures.seconds.labels(request.url.path, status)
        taken.observe(time.perf_counter() - began)
        if not work.answer.done():
            server.drop([work])


async def _texts(
    server: Server, pieces: asyncio.Queue[int | None], token: int | None
) -> AsyncIterator[str]:
    """What is written, in pieces of whole characters; together they are the whole text."""
    ids, shown = list[int](), 0
    while token is not None:
        ids.append(token)
        text = server.decode(ids)
        if not text.endswith("�"):  # the bytes of a character may be several tokens
            yield text[shown:]
            shown = len(text)
        token = await pieces.get()
    if len(text := server.decode(ids)) > shown:
        yield text[shown:]
