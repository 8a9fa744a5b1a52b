"""Language models: what is written together is what is written alone, over every route."""

import dataclasses
import json
import shutil
import time
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from rekindle.records import Evidence
from rekindle.serve.messages import ASK_SHADOW, LogTo
from rekindle.serve.work import PendingInstance, WritingOptions
from rekindle.serve.writer import Writer
from rekindle.train.modelfolder import open_model
from tests.serve import models
from tests.serve.servers import running


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return models.made(tmp_path_factory.mktemp("lm"), "text-lm", seed=3)


@pytest.fixture(scope="module")
def writer(text_model):
    opened = open_model(Path(text_model.path))
    return Writer(opened, opened.task, torch.device("cpu"))


PROMPTS = [[("text", text[: 2 + 3 * i])] for i, text in enumerate(models.TEXTS * 3)]


def test_more_prompts_than_room_are_written_as_the_task_writes_each(writer):
    opened = writer.opened
    alone = opened.task.generate(writer.network, PROMPTS, opened.settings, opened.path, 12)
    assert len(PROMPTS) > writer.room
    assert [
        one["text"] for one in writer.answers(PROMPTS, WritingOptions(max_new_tokens=12))
    ] == alone
    assert len(set(alone)) > 8


def test_a_seed_draws_the_same_text_alone_and_together(writer):
    drawn = WritingOptions(max_new_tokens=8, temperature=1.0, seed=5)
    together = writer.answers(PROMPTS, drawn)
    assert together == [writer.answers([prompt], drawn)[0] for prompt in PROMPTS]
    other = writer.answers(PROMPTS, drawn.model_copy(update={"seed": 6}))
    assert sum(a != b for a, b in zip(together, other, strict=True)) > 12


def test_texts_of_uneven_length_join_and_leave(writer):
    lengths = [1, 20, 3, 9, 2, 14, 5, 11]
    each = [
        writer.answers([p], WritingOptions(max_new_tokens=n))[0]
        for p, n in zip(PROMPTS, lengths, strict=False)
    ]
    works = [
        PendingInstance(p, WritingOptions(max_new_tokens=n))
        for p, n in zip(PROMPTS, lengths, strict=False)
    ]
    found, turn = {}, 0
    while len(found) < len(works):
        new = works[turn : turn + 1]  # one more joins at each turn
        found |= {work: e for work, e in writer.turn_with_retry(new) if isinstance(e, dict)}
        turn += 1
    assert [found[work] for work in works] == each
    assert not writer.busy


def test_a_prompt_without_room_for_an_answer_is_cut_in_front_and_marked(writer):
    (found,) = writer.answers([[("text", "order " * 4_000)]], WritingOptions(max_new_tokens=16))
    assert found["truncated"] is True
    assert found["prompt_tokens"] == 4_096 - 16
    room = len(
        writer.text(
            PendingInstance([("text", "order " * 4_000)], WritingOptions(max_new_tokens=4_000))
        ).prompt
    )
    assert room == 2_048, "however much may be written, half of the positions are the prompt's"


@pytest.fixture(scope="module")
def server(text_model):
    with running(text_model) as found:
        yield found


def complete(server, **asked):
    body = {"model": "tickets", "prompt": "the parcel c", "max_tokens": 8, **asked}
    return server.client.post("/v1/completions", json=body)


@pytest.mark.slow
def test_all_routes_write_the_same_text(server, text_model):
    row = Evidence.read(text_model.evidence).smoke.rows[0]
    prompt = json.loads(row.content)[0][1]
    assert prompt == "the parcel c"
    expected = row.answer["text"]
    ours = server.predict(prompt, parameters={"max_new_tokens": 8}).json()["predictions"][0]
    whole = complete(server).json()
    assert ours["text"] == whole["choices"][0]["text"] == expected
    assert whole["usage"]["total_tokens"] == ours["prompt_tokens"] + ours["tokens"]
    inputs = [{"name": "body", "shape": [1], "datatype": "BYTES", "data": [prompt]}]
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 8}}
    outputs = server.client.post("/v2/models/tickets/infer", json=body).json()["outputs"]
    assert (outputs[0]["name"], outputs[0]["data"]) == ("text", [expected])
    about = server.client.get("/v2/models/tickets").json()["outputs"]
    assert [(one["name"], one["datatype"]) for one in outputs] == [
        (one["name"], one["datatype"]) for one in about
    ]


def pieces(response):
    """The events of a stream, without the last, `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.slow
def test_a_stream_has_the_text_in_pieces_of_whole_characters(server):
    drawn = {
        "temperature": 1.5,
        "seed": 4,
        "max_tokens": 40,
    }  # bytes that are no character among them
    whole = complete(server, **drawn).json()["choices"][0]
    body = {"model": "tickets", "prompt": "the parcel c", "stream": True, **drawn}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = pieces(response)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert len(events) > 10


@pytest.mark.slow
def test_a_stream_is_logged_repeated_in_the_shadow_and_counted_when_it_ends(text_model, tmp_path):
    model = dataclasses.replace(text_model, log=LogTo(str(tmp_path), text=True))
    other = models.made(tmp_path / "next", "text-lm", seed=4)
    asked = {"model": "tickets", "prompt": "my parcel", "stream": True, "max_tokens": 60}
    with running(model.with_shadow(other)) as server:
        began = time.monotonic()
        with server.client.stream("POST", "/v1/completions", json=asked) as response:
            pieces(response)
        took = time.monotonic() - began
        count = 'rekindle_request_seconds_count{route="/v1/completions",status="200"}'
        server.until(lambda: server.figure(count) == 1)
        assert took / 2 < server.figure(count.replace("_count", "_sum")) < took
        body = {"instances": [ASK_SHADOW]}
        seen = server.until(
            lambda: server.client.post("/predict", json=body).json()["predictions"][0]["answered"]
        )
        assert seen == 1
    (file,) = tmp_path.rglob("date=*/**/*.parquet")
    (row,) = pq.ParquetFile(file).read().to_pylist()
    assert "my parcel" in row["text"]
    assert took / 2 < row["seconds"] < took


@pytest.mark.slow
def test_a_stream_whose_client_went_away_is_dropped(server):
    before = server.figure("rekindle_dropped_total")
    body = {"model": "tickets", "prompt": "a", "stream": True, "max_tokens": 4_000}
    with (
        httpx.Client(base_url=server.url) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        next(response.iter_lines())
    server.until(lambda: server.figure("rekindle_dropped_total") == before + 1)
    assert server.predict("a", parameters={"max_new_tokens": 1}).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({"model": "gpt-9"}, 404, "there is no model `gpt-9`"),
        ({"best_of": 3}, 400, "best_of: Extra inputs are not permitted"),
        ({"max_tokens": 4_097}, 400, "max_tokens: Input should be less than or equal to"),
        ({"n": 2}, 400, "n: Input should be less than or equal to 1"),
        ({"max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1"),
        ({"temperature": 3}, 400, "temperature: Input should be less than or equal to 2"),
        ({"prompt": ""}, 400, "instance 0, `body`: a text that is not empty is needed"),
    ],
)
def test_what_would_change_nothing_is_refused(server, asked, status, said):
    response = complete(server, **asked)
    error = response.json()["error"]
    assert (response.status_code, error["message"][: len(said)]) == (status, said)
    assert error["type"] == "invalid_request_error"


@pytest.mark.slow
def test_what_is_null_is_left_out_as_in_openais_clients(server):
    plain = complete(server)
    nulls = complete(server, stop=None, temperature=None, n=None, stream=None, logprobs=None)
    assert (nulls.status_code, nulls.json()["choices"]) == (200, plain.json()["choices"])
    assert complete(server, model=None).json()["error"]["message"] == "model: Field required"
    assert server.client.post("/v1/completions", json=[1]).status_code == 400


@pytest.mark.slow
def test_the_same_version_in_its_own_shadow_draws_the_same(text_model):
    drawn = {"parameters": {"temperature": 1.0, "max_new_tokens": 8}}
    with running(text_model.with_shadow(text_model)) as server:
        texts = {server.predict("once", **drawn).json()["predictions"][0]["text"] for _ in range(9)}
        assert len(texts) > 1

        def shadowed():
            body = {"instances": [ASK_SHADOW]}
            (found,) = server.client.post("/predict", json=body).json()["predictions"]
            return found if found["answered"] >= 9 else None

        assert server.until(shadowed)["differed"] == 0


@pytest.mark.slow
def test_a_chat_answers_whole_and_streamed(tmp_path):
    model = models.made(tmp_path, "chat", seed=1)
    row = Evidence.read(model.evidence).smoke.rows[0]
    messages = [{"role": role, "content": text} for role, text in json.loads(row.content)]
    body = {"model": "tickets", "messages": messages, "max_tokens": 8}
    with running(model) as server:
        whole = server.client.post("/v1/chat/completions", json=body).json()
        assert whole["object"] == "chat.completion"
        assert whole["choices"][0]["message"] == {
            "role": "assistant",
            "content": row.answer["text"],
        }
        with server.client.stream(
            "POST", "/v1/chat/completions", json={**body, "stream": True}
        ) as response:
            events = pieces(response)
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        text = "".join(event["choices"][0]["delta"]["content"] for event in events)
        assert text == row.answer["text"]
        assert complete(server).status_code == 400  # a chat is no text that goes on
        dumped = [{**m, "refusal": None, "tool_calls": None} for m in messages]  # as a client does
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        for same in (dumped, parts):
            again = server.client.post("/v1/chat/completions", json={**body, "messages": same})
            assert again.json()["choices"] == whole["choices"]
        long = {**body, "messages": [{"role": "user", "content": "order " * 4_000}]}
        assert "truncated" not in whole
        assert server.client.post("/v1/chat/completions", json=long).json()["truncated"] is True
        with server.client.stream(
            "POST", "/v1/chat/completions", json={**long, "stream": True}
        ) as response:
            assert [event.get("truncated") for event in pieces(response)][-1] is True
        for bad in ([], [{"type": "image_url"}], [{"type": "text"}], ["hi"], 3):
            wrong = {**body, "messages": [{"role": "user", "content": bad}]}
            assert server.client.post("/v1/chat/completions", json=wrong).status_code == 400
        wrong = {**body, "messages": [*messages, {"role": "assistant", "content": "a"}]}
        assert server.client.post("/v1/chat/completions", json=wrong).status_code == 400


def test_a_temperature_next_to_nothing_fails_no_text(writer):
    """Scores divided by it would be infinite, and with them fail all texts under way."""
    works = [
        PendingInstance(PROMPTS[0], WritingOptions(max_new_tokens=6)),
        PendingInstance(PROMPTS[1], WritingOptions(max_new_tokens=6, temperature=1e-320)),
    ]
    found = dict(writer.turn(works[:1]))
    events = writer.turn(works[1:])
    while writer.busy:
        events += writer.turn([])
    answers = {work: event for work, event in [*found.items(), *events] if isinstance(event, dict)}
    assert [answers[work]["tokens"] for work in works] == [6, 6]


def test_texts_that_cannot_begin_leave_those_under_way_alone(writer, monkeypatch):
    works = [PendingInstance(PROMPTS[i], WritingOptions(max_new_tokens=6)) for i in (0, 1)]
    events = writer.turn(works[:1])
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "argmax", lambda *_: 1 / 0)  # what a token is chosen by
        broken = dict(writer.turn(works[1:]))
    assert {event.reason for event in broken.values()} == {"internal"}
    assert not writer.busy
    assert [one["tokens"] for one in writer.answers([PROMPTS[0]], works[0].options)] == [6]
    assert events


@pytest.mark.slow
def test_a_stream_that_fails_is_no_success(text_model, tmp_path):
    """What fails before the first token has a status of its own, which a router counts and asks another version for."""
    copy = shutil.copytree(text_model.path, tmp_path / "model")
    weights = safetensors.torch.load_file(copy / "model.safetensors")
    weights["model.norm.weight"] *= float("nan")
    safetensors.torch.save_file(weights, copy / "model.safetensors", {"format": "pt"})
    broken = models.again(dataclasses.replace(text_model, path=str(copy)))
    with running(broken, smoke=False) as server:
        body = {"model": broken.name, "prompt": "once upon", "max_tokens": 4, "stream": True}
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "not_finite"
        assert server.figure('rekindle_refused_total{reason="not_finite"}') == 1
        route = 'rekindle_request_seconds_count{route="/v1/completions",status='
        assert server.figure(f'{route}"500"}}') == 1
        assert server.figure(f'{route}"200"}}') == 0


@pytest.mark.slow
def test_a_client_that_leaves_before_the_first_token_is_dropped_and_refused_nothing(text_model):
    with running(text_model) as server:
        body = {"model": text_model.name, "max_tokens": 1, "stream": True}
        slow = {**body, "prompt": "long " * 4_000}  # its first token takes a while
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/v1/completions", json=slow, timeout=httpx.Timeout(60, read=0.001)
            )
        server.until(lambda: server.client.get("/health/ready").status_code == 200)
        assert (
            server.client.post("/v1/completions", json={**body, "prompt": "a"}).status_code == 200
        )
        assert server.figure("rekindle_refused_total") == 0
