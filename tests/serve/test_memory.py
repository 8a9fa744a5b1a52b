"""What was proven is what answers: a model's files are rewritten, moved and deleted once it is loaded; and what becomes of a
server whose model breaks."""

import asyncio
import collections
import dataclasses
import json
import math
import shutil
from pathlib import Path

import aiohttp
import pytest

from rekindle.errors import RequestError
from rekindle.serve.classifier import reads_at_requests
from rekindle.serve.listening import listen
from rekindle.serve.load import load_served
from rekindle.serve.messages import ServeJob
from rekindle.serve.server import MOST_FAILED, Server
from rekindle.serve.work import RefusedError, WritingOptions
from rekindle.train.modelfolder import open_model
from tests.ports import free_port
from tests.serve import models
from tests.serve.servers import Running, running

KINDS = ("text", "words", "image", "text-lm", "chat")
FEW = WritingOptions(max_new_tokens=6)


def contents(kind):
    """What a model of this kind is asked, as `Inputs` gives it."""
    if kind in ("text-lm", "chat"):
        return [json.loads(row) for row, _ in models.contents(kind)]
    return [raw for _, raw in models.contents(kind)]


def rewrite(folder: Path) -> None:
    """Write other bytes into each file, where it lies."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            content = file.read_bytes()
            with file.open("r+b") as same:
                same.write(content[::-1])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_answers_alike_when_its_files_are_rewritten_and_gone(tmp_path, kind):
    made = models.made(tmp_path, kind)
    model, _, _ = load_served(made)
    mapped = [line for line in Path("/proc/self/maps").read_text().split("\n") if made.path in line]
    assert mapped == [], "weights that are mapped change with their file"
    before = model.answers(contents(kind), FEW)
    assert not any(isinstance(answer, RefusedError) for answer in before)
    rewrite(Path(made.path))
    assert model.answers(contents(kind), FEW) == before
    shutil.rmtree(made.path)
    assert model.answers(contents(kind), FEW) == before


@pytest.mark.parametrize(
    ("change", "what"),
    [(rewrite, "are not those that were registered"), (shutil.rmtree, "are gone")],
)
def test_files_that_changed_before_they_are_loaded_are_refused(tmp_path, change, what):
    made = models.made(tmp_path, "image")
    change(Path(made.path))
    with pytest.raises(RequestError, match=f"the files of version 3 {what}") as caught:
        load_served(made)
    assert caught.value.problems[0].fix == "restore them, or deploy tickets again"


READS = models.OWN_TASK.replace(
    '        return {"number": pa.array(',
    '        (assets / "offset.txt").read_text()\n        return {"number": pa.array(',
)
HOLDS = READS.replace(
    "    def build(", "    def hold(self, settings, assets):\n        pass\n\n    def build("
)


@pytest.mark.parametrize(("code", "watched"), [(READS, True), (HOLDS, False)])
def test_a_task_that_reads_files_at_each_request_ends_the_server_when_they_change(
    tmp_path, code, watched
):
    own = models.own(tmp_path, code)
    offset = Path(own.path) / "offset.txt"
    offset.write_text("0")
    made = models.again(own)
    assert reads_at_requests(open_model(Path(made.path), made.code)) == watched
    model, _, _ = load_served(made)
    (fine,) = model.answers(["1"], WritingOptions())
    assert (fine["label"], model.broken) == ("high", False)
    away = offset.parent.with_name("away")
    offset.parent.rename(away)
    (answer,) = model.answers(["1"], WritingOptions())
    assert (answer.status, model.broken) == (500, False), "it is gone, and what reads it fails"
    away.rename(offset.parent)
    (answer,) = model.answers(["1"], WritingOptions())
    assert answer == fine, "it is back"
    offset.write_text("7")
    (answer,) = model.answers(["1"], WritingOptions())
    assert model.broken == watched
    assert not watched or (answer.status, str(answer)) == (500, "the files of the model changed")


def test_a_chat_that_breaks_the_template_fails_alone(tmp_path):
    """By an error that is not one of Jinja's own."""
    made = models.made(tmp_path, "chat")
    folder = Path(made.path)
    source = (folder / "chat_template.jinja").read_text()
    breaks = "{% for m in messages %}{% if m.content == 'boom' %}{{ 1 / 0 }}{% endif %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(breaks + source)
    model, _, _ = load_served(models.again(made))
    boom, fine = model.answers([[("user", "boom")], [("user", "a refund please")]], FEW)
    assert isinstance(boom, RefusedError)
    assert fine["tokens"] > 0
    assert not model.busy


class Asked:
    """Clients that ask one body after another, and count what comes."""

    def __init__(self, url: str, total: int) -> None:
        self.url, self.total, self.left = url, total, iter(range(total))
        self.seen, self.others = collections.Counter(), []
        self.bodies = [
            {"instances": [{"body": text} for text in models.TEXTS[i : i + 1 + i % 4]]}
            for i in range(len(models.TEXTS))
        ]
        self.expected = list[object]()

    @property
    def done(self) -> int:
        return sum(self.seen.values())

    async def learn(self, client: aiohttp.ClientSession) -> None:
        for body in self.bodies:
            async with client.post(f"{self.url}/predict", json=body) as response:
                self.expected.append((await response.json())["predictions"])

    async def ask(self, client: aiohttp.ClientSession) -> None:
        for number in self.left:
            at = number % len(self.bodies)
            try:
                async with client.post(f"{self.url}/predict", json=self.bodies[at]) as response:
                    if response.status == 503:
                        self.seen["not ready"] += 1
                        continue
                    answer = await response.json()
            except aiohttp.ClientError as error:
                self.seen["lost"] += 1
                self.others.append(repr(error))
                continue
            same = response.status == 200 and alike(answer["predictions"], self.expected[at])
            self.seen["same" if same else "other"] += 1
            if not same:
                self.others.append(answer)


def alike(found, expected):
    """The same but for how batches round."""
    return len(found) == len(expected) and all(
        one["label"] == other["label"]
        and math.isclose(one["probability"], other["probability"], abs_tol=1e-5)
        for one, other in zip(found, expected, strict=True)
    )


async def mistreat(folder: Path, asked: Asked) -> None:
    """What happens to folders, spread over the requests."""
    away = folder.with_name("away")

    def reversed_tokenizer(here):
        told = json.loads((here / "tokenizer.json").read_text())
        words = told["model"]["vocab"]
        told["model"]["vocab"] = dict(zip(words, reversed(words.values()), strict=True))
        (here / "tokenizer.json").write_text(json.dumps(told))

    def cut_short(here):
        for file in here.iterdir():
            file.write_bytes(b"")

    changes = [
        lambda: reversed_tokenizer(folder),
        lambda: rewrite(folder),
        lambda: folder.rename(away),
        lambda: away.rename(folder),
        lambda: cut_short(folder),
        lambda: shutil.rmtree(folder),
    ]
    for number, change in enumerate(changes, 1):
        while asked.done < asked.total * number / (len(changes) + 2):
            await asyncio.sleep(0.005)
        change()


ROUTES = (
    "/health/live",
    "/health/ready",
    "/v2/health/ready",
    "/v2/models/tickets/ready",
    "/metrics",
    "/openapi.json",
    "/v2",
    "/v2/models/tickets",
    "/v1/models",
    "/ping",
)


async def endure(url: str, total: int, folder: Path) -> Asked:
    asked = Asked(url, total)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client:
        await asked.learn(client)
        await asyncio.gather(mistreat(folder, asked), *(asked.ask(client) for _ in range(8)))
        statuses = {}
        for route in ROUTES:
            async with client.get(url + route) as response:
                statuses[route] = response.status
        assert statuses == dict.fromkeys(ROUTES, 200), "all routes answer without the folder"
        infer = {"inputs": [{"name": "body", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}
        async with client.post(f"{url}/v2/models/tickets/infer", json=infer) as response:
            assert response.status == 200
        csv = {"content-type": "text/csv"}
        async with client.post(f"{url}/invocations", data=b"x y\n", headers=csv) as response:
            assert response.status == 200
    return asked


@pytest.mark.slow
def test_a_server_whose_folder_is_rewritten_moved_and_deleted_answers_alike(tmp_path):
    """In this process, of which the start is paid already; 100,000 requests of a process of its own are below."""
    made = models.made(tmp_path, "text")
    job = ServeJob(model=made, host="127.0.0.1", port=free_port(), smoke=True)

    async def both():
        server = Server(job, listen(job.host, job.port))
        running = asyncio.create_task(server.run())
        while server.state != "ready":
            assert not running.done(), await running
            await asyncio.sleep(0.01)
        asked = await endure(f"http://127.0.0.1:{job.port}", 2_000, Path(made.path))
        await server._drain()
        await running
        return asked

    asked = asyncio.run(both())
    assert asked.seen == {"same": 2_000}, (asked.seen, asked.others[:3])


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_of_100_000_requests_to_a_server_whose_folder_goes_none_is_lost_or_answered_otherwise(
    tmp_path,
):
    made = models.made(tmp_path, "text")
    with running(made) as server:
        asked = asyncio.run(endure(server.url, 100_000, Path(made.path)))
    print(f"100,000 requests while the folder was rewritten, moved and deleted: {dict(asked.seen)}")
    assert asked.seen == {"same": 100_000}, asked.others[:3]


LIMITED = models.OWN_TASK.replace(
    "        if len(numbers) > 4:",
    "        if (numbers == 9).any():\n            raise IndexError(9)\n        if len(numbers) > 4:",
)


def test_an_instance_that_fails_the_model_fails_no_other(tmp_path):
    """Neither where it is encoded nor where the network reads it."""
    model, _, _ = load_served(models.own(tmp_path, LIMITED))
    for wrong in ("no number", "9"):
        first, failed, last = model.answers(["1", wrong, "-2"], WritingOptions())
        assert (first["label"], last["label"]) == ("high", "low")
        assert (failed.status, failed.reason) == (500, "internal")


ENDS = models.OWN_TASK.replace(
    "        if len(numbers) > 4:",
    "        if (numbers == 99).any():\n            raise SystemExit(3)\n        if len(numbers) > 4:",
)


@pytest.mark.slow
def test_an_inference_thread_that_ends_answers_what_it_had_and_ends_the_server(tmp_path):
    server = Running.of(models.own(tmp_path, ENDS)).ready()
    try:
        assert server.predict("1", column="text").status_code == 200
        response = server.predict("99", column="text")
        assert response.status_code == 500
        assert "the model failed; the server's log says why" in response.text
        assert server.ended() == 1
        said = server.log.read_text()
        assert "the inference thread ended" in said
        assert "SystemExit: 3" in said
    finally:
        server.stop()


FAILS = models.OWN_TASK.replace(
    "        if len(numbers) > 4:",
    '        if (numbers > 80).any() or (network.folder.parent / "broken").exists():\n'
    '            raise ValueError("no answer")\n        if len(numbers) > 4:',
)


@pytest.mark.slow
@pytest.mark.parametrize("smoke", [True, False])
def test_a_model_that_fails_every_request_is_not_ready_until_it_answers_again(tmp_path, smoke):
    broken = tmp_path / "broken"
    with running(models.own(tmp_path, FAILS), smoke) as server:

        def fail(text):
            for _ in range(MOST_FAILED + 5):
                assert server.predict(text, column="text").status_code == 500

        def state():
            response = server.client.get("/health/ready")
            return response.status_code, response.json()["state"]

        if smoke:  # the requests' fault: the model answers the rows that prove it
            fail("90")
            server.until(
                lambda: (
                    server.figure('rekindle_request_seconds_count{route="/predict",status="200"}')
                    >= 2
                )
            )
            assert state() == (200, "ready")
        broken.touch()
        fail("1")
        server.until(lambda: state() == (503, "failing"))
        assert server.client.get("/health/live").status_code == 200
        broken.unlink()
        if not smoke:  # any answer shows that it is well again
            assert server.predict("1", column="text").status_code == 200
        server.until(lambda: state() == (200, "ready"))


@pytest.mark.slow
def test_the_shadow_reads_the_request_itself(tmp_path):
    """It has another column, and refuses what the version before answers."""
    from tests.serve.models import ColumnsSpec

    model = models.own(tmp_path / "now")
    other = models.own(tmp_path / "next", version="4")
    shadow = dataclasses.replace(other, columns=ColumnsSpec(text="message"))
    server = Running.of(model.with_shadow(shadow)).ready()
    try:
        body = {"instances": [{"rekindle/shadow": True}]}

        def counted():
            return server.client.post("/predict", json=body).json()["predictions"][0]

        before = counted()["answered"]
        for instance in ({"text": "1"}, {"text": "1"}, {"text": "1", "message": "2"}):
            sent = server.client.post("/predict", json={"instances": [instance]})
            assert sent.json()["predictions"][0]["label"] == "high"
        server.until(lambda: counted()["answered"] == before + 3)
        after = counted()
        assert (after["refused"], after["failed"], after["differed"]) == (2, 0, 0)
    finally:
        server.stop()
