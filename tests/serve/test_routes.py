"""A text classifier over HTTP: our own route, those of the platforms, and what is refused."""

import asyncio
import json
from pathlib import Path

import prometheus_client
import pytest
from starlette.requests import Request

from rekindle.records import Evidence
from rekindle.serve import wire
from rekindle.serve.listening import listen
from rekindle.serve.messages import ServeJob
from rekindle.serve.server import Server
from rekindle.serve.work import RefusedError
from tests.serve import models
from tests.serve.servers import running


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = models.made(tmp_path_factory.mktemp("text"), "text")
    with running(model) as found:
        found.model = model
        yield found


@pytest.fixture(scope="module")
def rows(server):
    return Evidence.read(server.model.evidence).smoke.rows


def alike(prediction, answer):
    return prediction["label"] == answer["label"] and prediction["probability"] == pytest.approx(
        answer["probability"], abs=1e-5
    )


def test_each_instance_gets_the_answer_that_it_gets_alone(server, rows):
    found = server.predict(*(row.content for row in rows)).json()
    assert len({row.answer["label"] for row in rows}) > 1
    assert all(map(alike, found["predictions"], (row.answer for row in rows)))
    assert found["model"] == {"name": "tickets", "version": "3", "digest": server.model.digest}


def test_a_text_that_is_too_long_is_answered_and_marked(server):
    fits, longer = server.predict("a " * 30, "a " * 31).json()["predictions"]
    assert "truncated" not in fits
    assert longer["truncated"] is True
    assert longer["probability"] == pytest.approx(fits["probability"], abs=1e-6)


def test_columns_that_the_model_does_not_read_are_left_alone(server):
    body = {"instances": [{"id": 7, "body": "a refund please", "label": "billing"}]}
    assert server.client.post("/predict", json=body).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"instances": [', 400, "the body: Invalid JSON"),
        (b'{"instances": [{"body": "\xff"}]}', 400, "the body: Invalid JSON: invalid unicode"),
        (b"[]", 400, "the body: "),
        (b"{}", 400, "instances: Field required"),
        (b'{"instances": []}', 400, "instances: List should have at least 1 item"),
        (
            b'{"instances": [{"text": "a", "id": 1}]}',
            400,
            "instance 0: there is no column `body`; it has `text`, `id`",
        ),
        (
            b'{"instances": [{"body": "a", "age": NaN}]}',
            400,
            "the body: NaN is not a value of JSON",
        ),
        (
            b'{"instances": [{"body": "a"}, {"body": 3}]}',
            400,
            "instance 1, `body`: a text that is not empty is needed",
        ),
        (
            b'{"instances": [{"body": " "}]}',
            400,
            "instance 0, `body`: a text that is not empty is needed",
        ),
        (
            b'{"instances": [{"body": "a"}], "temprature": 1}',
            400,
            "temprature: Extra inputs are not permitted",
        ),
        (
            b'{"instances": [{"body": "a"}], "parameters": {"seed": 1}}',
            400,
            "parameters: this model is no language model",
        ),
        (
            b'{"instances": [' + b",".join([b'{"body": "a"}'] * 257) + b"]}",
            400,
            "instances: List should have at most 256 items",
        ),
        (
            b'{"instances": [{"body": "' + b"a" * (10 << 20) + b'"}]}',
            413,
            "the body is larger than 4 MiB",
        ),
    ],
    ids=[
        "half",
        "not-utf8",
        "list",
        "nothing",
        "empty",
        "column",
        "nan",
        "type",
        "blank",
        "unknown",
        "no-lm",
        "many",
        "10MB",
    ],
)
def test_a_bad_request_is_told_what_is_wrong_and_the_server_goes_on(server, body, status, said):
    before = server.figure("rekindle_refused_total")
    response = server.client.post("/predict", content=body)
    assert response.status_code == status
    assert response.json()["error"].startswith(said)
    assert server.figure("rekindle_refused_total") == before + 1
    assert server.predict("where is my order").status_code == 200


def test_the_openapi_document_names_the_columns(server):
    found = server.client.get("/openapi.json").json()
    body = found["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert found["openapi"] == "3.1.0"
    assert body["properties"]["instances"]["items"]["required"] == ["body"]
    assert (
        body["properties"]["parameters"]["anyOf"][0]["$ref"].rpartition("/")[2]
        in found["components"]["schemas"]
    )


def test_vertex_asks_on_the_routes_that_it_names(server, rows):
    assert server.client.get("/h").status_code == 200
    found = server.client.post("/p", json={"instances": [{"body": rows[0].content}]}).json()
    assert alike(found["predictions"][0], rows[0].answer)


@pytest.mark.parametrize("media", ["application/json", "application/jsonlines", "text/csv"])
def test_sagemaker_asks_in_three_forms(server, rows, media):
    texts = [row.content for row in rows] + ['say "hello", twice']
    whole = json.dumps({"instances": [{"body": text} for text in texts]})
    lines = "\n".join(json.dumps({"body": text}) for text in texts) + "\n"
    cells = "".join('"{}"\r\n'.format(text.replace('"', '""')) for text in texts)
    content = {"application/json": whole, "text/csv": cells}.get(media, lines)
    assert server.client.get("/ping").status_code == 200
    response = server.client.post("/invocations", content=content, headers={"content-type": media})
    assert response.headers["content-type"].startswith(media)
    answers = response.text.splitlines()
    if media == "application/json":
        answers = response.json()["predictions"]
    elif media == "text/csv":
        pairs = (answer.split(",") for answer in answers)
        answers = [{"label": label, "probability": float(number)} for label, number in pairs]
    else:
        answers = [json.loads(answer) for answer in answers]
    assert len(answers) == len(texts)
    assert all(map(alike, answers, (row.answer for row in rows)))


@pytest.mark.parametrize(
    ("headers", "content", "status", "said"),
    [
        ({"content-type": "application/x-npy"}, b"x", 415, "application/x-npy is not read here"),
        (
            {"content-type": "text/csv", "accept": "application/json"},
            b"a",
            406,
            "the response has the type of the request",
        ),
        ({"content-type": "text/csv"}, b"a,b", 400, "row 1: one value, `body`, is needed"),
        ({"content-type": "text/csv"}, b"a\n\xff", 400, "the body is not a CSV in UTF-8"),
        (
            {"content-type": "application/jsonlines"},
            b'{"body": "a"}\n{"bod',
            400,
            "the body: Invalid JSON",
        ),
    ],
)
def test_what_sagemaker_must_not_send_is_refused(server, headers, content, status, said):
    response = server.client.post("/invocations", content=content, headers=headers)
    assert (response.status_code, response.json()["error"][: len(said)]) == (status, said)


def test_media_types_are_the_same_in_any_case(server):
    headers = {"content-type": "Text/CSV; charset=utf-8", "accept": "TEXT/csv"}
    response = server.client.post("/invocations", content="a\r\n", headers=headers)
    assert (response.status_code, response.text.count(",")) == (200, 1)


def v2(texts, **more):
    return {
        "inputs": [
            {"name": "body", "shape": [len(texts)], "datatype": "BYTES", "data": texts, **more}
        ]
    }


@pytest.mark.parametrize("path", ["tickets", "tickets/versions/3"])
def test_the_open_inference_protocol_is_spoken(server, rows, path):
    texts = [row.content for row in rows]
    assert server.client.get("/v2/health/ready").status_code == 200
    assert server.client.get(f"/v2/models/{path}/ready").status_code == 200
    for other in ("orders", "tickets/versions/4"):
        assert server.client.get(f"/v2/models/{other}/ready").status_code == 404
    about = server.client.get(f"/v2/models/{path}").json()
    assert (about["name"], about["versions"], about["inputs"][0]["name"]) == (
        "tickets",
        ["3"],
        "body",
    )
    found = server.client.post(f"/v2/models/{path}/infer", json={"id": "q", **v2(texts)}).json()
    assert (found["id"], found["model_name"], found["model_version"]) == ("q", "tickets", "3")
    known = [(one["name"], one["datatype"]) for one in found["outputs"]]
    assert [(one["name"], one["datatype"]) for one in about["outputs"]] == known
    labels, odds = found["outputs"]
    assert (labels["name"], labels["datatype"], labels["shape"]) == ("label", "BYTES", [len(texts)])
    assert (odds["name"], odds["datatype"]) == ("probability", "FP64")
    pairs = zip(labels["data"], odds["data"], strict=True)
    answers = [{"label": label, "probability": number} for label, number in pairs]
    assert all(map(alike, answers, (row.answer for row in rows)))


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("orders/infer", v2(["a"]), 404, "this is tickets, version 3, and no other"),
        ("tickets/versions/4/infer", v2(["a"]), 404, "this is tickets, version 3, and no other"),
        (
            "tickets/infer",
            v2(["a"], name="text"),
            400,
            "inputs: one input, called `body`, is needed",
        ),
        (
            "tickets/infer",
            v2(["a"], shape=[2]),
            400,
            "inputs: the shape [2] does not hold 1 values",
        ),
        (
            "tickets/infer",
            v2(["a"], datatype="FP32"),
            400,
            "inputs.0.datatype: Input should be 'BYTES'",
        ),
        ("tickets/infer", {"inputs": []}, 400, "inputs: List should have at least 1 item"),
        ("tickets/infer", v2([]), 400, "inputs: the shape [0] does not hold 0 values"),
        (
            "tickets/infer",
            v2(["a"] * 257),
            400,
            "inputs: the shape [257] does not hold 257 values, or they are not 1 to 256",
        ),
        (
            "tickets/infer",
            {**v2(["a"]), "outputs": [{"name": "score"}]},
            400,
            "outputs: there is no `score`; there is ['label', 'probability']",
        ),
        (
            "tickets/infer",
            {**v2(["a"]), "parameters": {"max_new_tokens": 2}},
            400,
            "parameters: this model is no language model",
        ),
    ],
)
def test_what_the_open_inference_protocol_must_not_ask_is_refused(server, path, body, status, said):
    response = server.client.post(f"/v2/models/{path}", json=body)
    assert (response.status_code, response.json()["error"][: len(said)]) == (status, said)


def test_a_classifier_is_no_language_model(server):
    body = {"model": "tickets", "prompt": "a"}
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "ask /predict" in response.json()["error"]["message"]


def test_what_it_says_of_itself_can_be_pasted(server):
    text = Path(server.log).read_text()
    assert f"tickets version 3 at {server.url}, proven by 8 rows of its test split" in text
    assert f"curl -s {server.url}/predict -d '{{" in text


def test_a_body_that_never_ends_is_refused_in_time(monkeypatch):
    """Else it would hold up a server that is told to end."""
    monkeypatch.setattr(wire, "BODY_SECONDS", 0.05)
    parts = [{"type": "http.request", "body": b'{"instances"', "more_body": True}]

    async def receive():
        return parts.pop() if parts else await asyncio.Event().wait()

    request = Request({"type": "http", "headers": []}, receive)
    with pytest.raises(RefusedError, match="the body took more than") as caught:
        asyncio.run(wire.read_body(request))
    assert caught.value.status == 408


def test_a_slash_too_many_is_not_sent_elsewhere(server):
    """Behind the router, elsewhere would be the server itself."""
    assert server.client.post("/predict/", json={}).status_code == 404


@pytest.mark.slow
def test_what_fails_in_an_endpoint_is_a_500_that_is_counted(server):
    async def broken(request):
        raise ZeroDivisionError

    async def asked():
        job = ServeJob(server.model, "127.0.0.1", 0, smoke=False)
        with listen(job.host, job.port) as listening:
            one = Server(job, listening)
        one.state = "ready"
        response = await one._counted("/x", broken)(Request({"type": "http", "headers": []}))
        return response, prometheus_client.generate_latest(one.figures.registry).decode()

    response, figures = asyncio.run(asked())
    assert (response.status_code, response.body) == (
        500,
        b'{"error":"the server failed; its log says why"}',
    )
    assert 'rekindle_request_seconds_count{route="/x",status="500"} 1.0' in figures
