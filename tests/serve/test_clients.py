"""Clients that others wrote against the real server: curl, OpenAI's package, NVIDIA's for the Open Inference Protocol. The
clouds' own clients ask in tests/platforms/*/test_endpoint.py.

tritonclient does not install beside our pins (it wants an older greenlet). To run its tests:
`pip install --no-deps --target FOLDER tritonclient geventhttpclient gevent zope.event zope.interface brotli python-rapidjson
ml-dtypes`, and FOLDER in PYTHONPATH."""

import contextlib
import json
import shutil
import subprocess

import numpy as np
import pytest

from rekindle.records import Evidence
from tests.serve import models
from tests.serve.servers import running

pytestmark = pytest.mark.slow
TRITON = "tritonclient is not installed; this file's docstring says how"


def started(factory, kind, seed=0):
    model = models.made(factory.mktemp(kind), kind, seed=seed)
    with running(model) as server:
        server.rows = Evidence.read(model.evidence).smoke.rows
        yield server


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    yield from started(tmp_path_factory, "text")


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    yield from started(tmp_path_factory, "chat", seed=1)


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    yield from started(tmp_path_factory, "text-lm", seed=3)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_sends_a_file_a_large_body_and_a_wrong_one(classifier, tmp_path):
    def curl(*words):
        done = subprocess.run(["curl", "-sS", *words], capture_output=True, text=True, check=True)
        return done.stdout

    url, rows = f"{classifier.url}/predict", classifier.rows
    (tmp_path / "body.json").write_text(
        json.dumps({"instances": [{"body": r.content} for r in rows]})
    )
    found = json.loads(curl(url, "-d", f"@{tmp_path}/body.json"))["predictions"]
    assert [one["label"] for one in found] == [row.answer["label"] for row in rows]
    (tmp_path / "large").write_bytes(b'{"instances": [{"body": "' + b"a" * (5 << 20) + b'"}]}')
    # above 1 MiB curl waits for `100 Continue`
    said = curl(url, "-w", "%{http_code}", "-d", f"@{tmp_path}/large")
    assert said.endswith("413")
    assert "larger than 4 MiB" in said
    said = curl(url, "-w", "%{http_code}", "-H", "Transfer-Encoding: chunked", "-d", "{")
    assert said.endswith("400")
    assert curl(f"{classifier.url}/health/ready", "-o", "/dev/null", "-w", "%{http_code}") == "200"


def openai_of(server):
    openai = pytest.importorskip("openai", reason="openai is a developer's dependency")
    return openai, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def messages_of(row):
    return [{"role": role, "content": text} for role, text in json.loads(row.content)]


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_openai_s_package_chats(chat, limit):
    _, client = openai_of(chat)
    row = chat.rows[0]
    found = client.chat.completions.create(
        model="tickets", messages=messages_of(row), temperature=0, **{limit: 8}
    )
    choice = found.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", row.answer["text"])
    assert choice.finish_reason in ("stop", "length")
    assert (found.object, found.model) == ("chat.completion", "tickets")
    usage = found.usage
    assert usage.prompt_tokens > 0
    assert 0 < usage.completion_tokens <= 8
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_openai_s_package_reads_a_stream_and_its_usage(chat):
    openai, client = openai_of(chat)
    row = chat.rows[0]
    asked = {"model": "tickets", "messages": messages_of(row), "max_completion_tokens": 8}
    whole = client.chat.completions.create(**asked)
    events = list(client.chat.completions.create(**asked, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events) == row.answer["text"]
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert {event.usage for event in events} == {None}
    counted = {"include_usage": True}
    events = list(client.chat.completions.create(**asked, stream=True, stream_options=counted))
    assert (events[-1].choices, events[-1].usage) == ([], whole.usage)
    with client.chat.completions.stream(**asked) as stream:  # what assembles the whole again
        with contextlib.suppress(openai.LengthFinishReasonError):
            stream.until_done()
        message = stream.current_completion_snapshot.choices[0].message
    assert (message.role, message.content) == ("assistant", row.answer["text"])


def test_openai_s_package_has_a_text_go_on(writer):
    _, client = openai_of(writer)
    row = writer.rows[0]
    asked = {"model": "tickets", "prompt": json.loads(row.content)[0][1], "max_tokens": 8}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text == row.answer["text"]
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    events = list(client.completions.create(**asked, stream=True))
    assert "".join(event.choices[0].text for event in events) == row.answer["text"]
    drawn = {"temperature": 1.2, "seed": 5, **asked}
    texts = {client.completions.create(**drawn).choices[0].text for _ in range(2)}
    assert len(texts) == 1


def test_openai_s_package_lists_the_model_and_raises_its_own_errors(chat):
    openai, client = openai_of(chat)
    assert [one.id for one in client.models.list()] == ["tickets"]
    assert client.models.retrieve("tickets").object == "model"
    asked = {"messages": messages_of(chat.rows[0])}
    with pytest.raises(openai.NotFoundError, match="there is no model `gpt-9`") as error:
        client.chat.completions.create(model="gpt-9", **asked)
    assert error.value.code == "unknown_model"
    with pytest.raises(openai.NotFoundError, match="this is tickets, version 3, and no other"):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.BadRequestError, match="logit_bias: Extra inputs"):
        client.chat.completions.create(model="tickets", logit_bias={"1": 1}, **asked)
    with pytest.raises(openai.BadRequestError, match="ask /v1/chat/completions"):
        client.completions.create(model="tickets", prompt="a")


def triton_of(server):
    triton = pytest.importorskip("tritonclient.http", reason=TRITON)
    return triton, triton.InferenceServerClient(server.url.removeprefix("http://"))


def test_nvidia_s_client_sees_server_and_model(classifier):
    triton, client = triton_of(classifier)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tickets")
    assert client.is_model_ready("tickets", "3")
    assert client.get_server_metadata()["name"] == "rekindle"
    found = client.get_model_metadata("tickets", "3")
    assert (found["versions"], found["inputs"][0]["datatype"]) == (["3"], "BYTES")
    with pytest.raises(
        triton.InferenceServerException, match="this is tickets, version 3, and no other"
    ):
        client.get_model_metadata("orders")


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_nvidia_s_client_infers_with_and_without_binary_data(classifier, shape, binary):
    """It sends and wants binary data where it is not asked for JSON."""
    triton, client = triton_of(classifier)
    rows = classifier.rows
    texts = np.array([row.content.encode() for row in rows] + ["Grüße".encode()], object)
    asked = triton.InferInput("body", list(texts.reshape(shape).shape), "BYTES")
    asked.set_data_from_numpy(texts.reshape(shape), binary_data=binary)
    names = ("label", "probability")
    wanted = None if binary else [triton.InferRequestedOutput(n, binary_data=False) for n in names]
    found = client.infer("tickets", [asked], outputs=wanted, request_id="q")
    labels, odds = map(found.as_numpy, names)
    labels = [label.decode() if binary else label for label in labels]
    assert labels[:-1] == [row.answer["label"] for row in rows]
    assert odds[:-1].tolist() == pytest.approx([r.answer["probability"] for r in rows], abs=1e-5)
    assert found.get_response()["id"] == "q"


def test_nvidia_s_client_asks_a_language_model_with_parameters(writer):
    triton, client = triton_of(writer)
    row = writer.rows[0]
    prompt = np.array([json.loads(row.content)[0][1].encode()], object)
    asked = triton.InferInput("body", [1], "BYTES")
    asked.set_data_from_numpy(prompt)
    found = client.infer("tickets", [asked], parameters={"max_new_tokens": 8})
    assert found.as_numpy("text")[0].decode() == row.answer["text"]
    assert found.as_numpy("tokens").dtype == np.int64
    one = [triton.InferRequestedOutput("text")]
    found = client.infer("tickets", [asked], outputs=one, parameters={"max_new_tokens": 8})
    assert [output["name"] for output in found.get_response()["outputs"]] == ["text"]
    assert found.as_numpy("text")[0].decode() == row.answer["text"]
    with pytest.raises(triton.InferenceServerException, match="there is no `label`"):
        client.infer("tickets", [asked], outputs=[triton.InferRequestedOutput("label")])


def test_what_is_wrong_with_binary_data_is_named(classifier):
    def asked(size, raw, head=None):
        tensor = {"name": "body", "shape": [1], "datatype": "BYTES"}
        tensor["parameters"] = {"binary_data_size": size}
        body = json.dumps({"inputs": [tensor]}).encode()
        length = {"inference-header-content-length": str(len(body)) if head is None else head}
        response = classifier.client.post(
            "/v2/models/tickets/infer", content=body + raw, headers=length
        )
        return response.status_code, response.json().get("error", "")

    fine = b"\x05\0\0\0hello"
    assert asked(9, fine)[0] == 200
    for size, raw, head in (
        (8, fine, None),
        (9, fine[:-1], None),
        (9, b"\xff\0\0\0hello", None),
        (3, b"\x05\0\0", None),
        (9, b"\x05\0\0\0hell\xff", None),
        (9, fine, "-1"),
        (9, fine, "x"),
        (9, fine, "9999"),
        (0, b"", None),
    ):
        status, error = asked(size, raw, head)
        assert (status, bool(error)) == (400, True), (size, raw, head)
