"""OpenAI's wire form: completions and chats, whole or streamed as server-sent events.

Settings that the model honours are taken, others refused. Without `temperature` the most
probable token is written. Authority: OpenAI's API reference, "Completions" and "Chat"."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import AliasChoices, Field, model_validator
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from rekindle.serve.wire import JSON, Body, json_bytes, parse, read_body
from rekindle.serve.work import (
    MOST_TOKENS,
    Answer,
    PendingInstance,
    Prediction,
    RefusedError,
    WritingOptions,
)

if TYPE_CHECKING:
    from rekindle.serve.answering import Answering, Reread
    from rekindle.serve.inputs import Inputs

_LIMITS = AliasChoices("max_tokens", "max_completion_tokens")


class _TextRequest(Body):
    model: str
    # newer clients say max_completion_tokens
    max_tokens: int = Field(64, ge=1, le=MOST_TOKENS, validation_alias=_LIMITS)
    temperature: float = 0.0
    seed: int | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] | None = None
    n: int = Field(1, ge=1, le=1)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """The body without fields that are null, whatever
        they are: OpenAI's own clients send them."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


class Completion(_TextRequest):
    """`POST /v1/completions`."""

    prompt: str


class Chat(_TextRequest):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]


async def answer_request(
    server: Answering, kind: type[Completion | Chat], request: Request
) -> Response:
    """The response to a text that is to go on, or a chat that is to be answered."""
    body = parse(kind, await read_body(request))
    if body.model != server.model.name:
        message = f"there is no model `{body.model}`: this is {server.model.name}"
        raise RefusedError(404, message, "unknown_model")
    reread = functools.partial(_contents, body)
    (content,), options = reread(server.inputs)
    is_chat = kind is Chat
    head: dict[str, object] = {
        "id": uuid.uuid4().hex,
        "created": int(time.time()),
        "model": body.model,
        "object": "chat.completion" if is_chat else "text_completion",
    }
    if body.stream:
        return await _begin_stream(server, request, body, content, options, head, reread)
    (prediction,) = await server.predictions(request, [content], options, reread)
    if "truncated" in prediction:
        head["truncated"] = True
    content_fields: dict[str, object]
    if is_chat:
        content_fields = {"message": {"role": "assistant", "content": prediction["text"]}}
    else:
        content_fields = {"text": prediction["text"]}
    completion = _choice(head, content_fields, prediction["finish_reason"])
    completion["usage"] = _usage(prediction)
    return Response(json_bytes(completion), media_type=JSON)


async def _begin_stream(
    server: Answering,
    request: Request,
    body: Completion | Chat,
    content: Any,
    options: WritingOptions,
    head: dict[str, object],
    reread: Reread,
) -> Response:
    """The response that streams what is written. Raises RefusedError, or
    ClientDisconnect, for what ends before its first token."""
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    pieces: asyncio.Queue[int | None] = asyncio.Queue()
    work = PendingInstance(content, options, answer, pieces)
    began = time.perf_counter()
    server.waiting.put([work])
    watching = server.watch(request, [work])
    # awaited before the response begins: its status
    # can still tell of what fails until then
    first_token = await pieces.get()
    watching.cancel()
    if first_token is None:
        refusal = await answer
        if isinstance(refusal, RefusedError):
            if work.gone:
                raise ClientDisconnect
            server.judge([refusal])
            raise refusal
    texts = _texts(server, pieces, first_token)
    asks_usage = (body.stream_options or {}).get("include_usage", False)
    stream = _Stream(server, request, work, answer, began, head, asks_usage, reread)
    return StreamingResponse(stream.events(texts), media_type="text/event-stream")


def _contents(body: Completion | Chat, inputs: Inputs) -> tuple[list[Any], WritingOptions]:
    """What the body asks of a model with these inputs. Raises RefusedError where the
    model answers at another route."""
    is_chat = isinstance(body, Chat)
    if not inputs.form or (inputs.form == "chat") != is_chat:
        routes = {"": "/predict", "chat": "/v1/chat/completions"}
        route = routes.get(inputs.form, "/v1/completions")
        raise RefusedError(400, f"this model does not answer here: ask {route}")
    content = body.messages if isinstance(body, Chat) else body.prompt
    settings = {
        "max_new_tokens": body.max_tokens,
        "temperature": body.temperature,
        "seed": body.seed,
    }
    # parsed as from JSON, so that what is out of
    # bounds is refused as a field of the body is
    options = parse(WritingOptions, json_bytes(settings))
    return inputs.contents([{inputs.column: content}]), options


def model_list(server: Answering, path: str) -> dict[str, object]:
    """`GET /v1/models`, and of one of them."""
    model = {"id": server.model.name, "object": "model", "created": 0, "owned_by": "rekindle"}
    return {"object": "list", "data": [model]} if path == "/v1/models" else model


def error_of(error: RefusedError) -> dict[str, object]:
    """A refusal as OpenAI's clients read it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.reason}}


def _choice(
    head: dict[str, object], content_fields: dict[str, object], reason: str | None
) -> dict[str, object]:
    choice = {"index": 0, "finish_reason": reason, "logprobs": None, **content_fields}
    return {**head, "choices": [choice]}


def _usage(prediction: Prediction) -> dict[str, int]:
    prompt_tokens = prediction["prompt_tokens"]
    completion_tokens = prediction["tokens"]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclasses.dataclass
class _Stream:
    """The server-sent events of one text; `head` is what all of them have."""

    server: Answering
    request: Request
    work: PendingInstance
    answer: asyncio.Future[Answer]
    began: float
    head: dict[str, object]
    asks_usage: bool
    reread: Reread

    def __post_init__(self) -> None:
        self.is_chat = self.head["object"] == "chat.completion"
        if self.is_chat:
            self.head["object"] = "chat.completion.chunk"

    async def events(self, texts: AsyncIterator[str]) -> AsyncIterator[bytes]:
        """The events, as bytes to send. At its end the response is counted and logged."""
        self.server.accepted += 1
        try:
            if self.is_chat:
                yield self._event("", role="assistant")
            async for text in texts:
                yield self._event(text)
            answer = await self.answer
            self.server.judge([answer])
            if isinstance(answer, RefusedError):
                self.server.figures.refused.labels(answer.reason).inc()
                yield _data(error_of(answer))
                return
            if "truncated" in answer:
                self.head["truncated"] = True
            yield self._event("", answer["finish_reason"])
            if self.asks_usage:
                yield _data({**self.head, "choices": [], "usage": _usage(answer)})
            yield b"data: [DONE]\n\n"
            seconds = time.perf_counter() - self.began
            self.server.note(self.request, [self.work], [answer], seconds, self.reread)
        finally:
            # also where the client went away, which closes this generator
            self._end()

    def _event(self, text: str, reason: str | None = None, **role: str) -> bytes:
        if self.is_chat:
            return _data(_choice(self.head, {"delta": {**role, "content": text}}, reason))
        return _data(_choice(self.head, {"text": text}, reason))

    def _end(self) -> None:
        """Count the response, and drop the work if its client did not wait."""
        self.server.accepted -= 1
        status = 499
        if self.answer.done():
            answer = self.answer.result()
            status = answer.status if isinstance(answer, RefusedError) else 200
        histogram = self.server.figures.seconds.labels(self.request.url.path, status)
        histogram.observe(time.perf_counter() - self.began)
        if not self.answer.done():
            self.server.drop([self.work])


def _data(event: dict[str, object]) -> bytes:
    return b"data: " + json_bytes(event) + b"\n\n"


async def _texts(
    server: Answering, pieces: asyncio.Queue[int | None], token: int | None
) -> AsyncIterator[str]:
    """The text as it is written, in pieces of whole characters."""
    ids = list[int]()
    shown = 0  # characters that were yielded
    while token is not None:
        ids.append(token)
        text = server.decode(ids)
        # the bytes of a character may be several tokens:
        # until all are there it is decoded as this
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[shown:]
            shown = len(text)
        token = await pieces.get()
    text = server.decode(ids)
    if len(text) > shown:
        yield text[shown:]
