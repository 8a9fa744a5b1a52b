"""Images that are known to have no Python, by whatever name they are pulled."""

import pytest

from rekindle.catalog.tables import lacks_python

ECR = "123456789012.dkr.ecr.eu-central-1.amazonaws.com"


@pytest.mark.parametrize(
    "image",
    [
        "alpine",
        "alpine:3.20",
        "busybox@sha256:0",
        "library/debian:12-slim",
        "docker.io/ubuntu:24.04",
        "docker.io/library/bash:5",
        "index.docker.io/library/redis",
        "public.ecr.aws/docker/library/nginx:1",
        f"{ECR}/docker-hub/library/alpine:3",
        "mirror.gcr.io/library/alpine",
        "curlimages/curl:8.9.1",
        "quay.io/curl/curl:8",
        "ghcr.io/jqlang/jq:1.7",
        "gcr.io/distroless/static-debian12",
    ],
)
def test_an_image_without_python_is_known_by_its_repository(image: str) -> None:
    assert lacks_python(image)


@pytest.mark.parametrize(
    "image",
    [
        "python:3.11",
        "python:3.12-alpine",
        f"{ECR}/alpine:3",
        "me/alpine",
        "localhost:5000/alpine",
        "ghcr.io/a/jq",
        "gcr.io/distroless/python3-debian12",
        "registry.example.com:443/debian",
        "alpine-with-python",
        "",
    ],
)
def test_an_image_that_may_have_python_is_not_taken_for_one_without(image: str) -> None:
    assert not lacks_python(image)
