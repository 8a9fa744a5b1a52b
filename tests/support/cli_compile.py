"""What tests share with cli/test_compile.py."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


TRACKED = ["--set", "register.tracking_uri=https://mlflow.example.com"]


IMAGE = "europe-docker.pkg.dev/p/r/train@sha256:" + "0" * 64


ECR = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/train@sha256:" + "0" * 64


ACR = "lake.azurecr.io/train@sha256:" + "0" * 64


PLATFORMS = {
    "azureml": (
        [
            "--set",
            "platforms.azureml.artifact_root=abfs://lake@acc.dfs.core.windows.net/rekindle",
            "--set",
            f"platforms.azureml.image={ACR}",
        ],
        "continuous-training.azureml.yaml",
    ),
    "kubeflow": (
        ["--set", "platforms.kubeflow.artifact_root=/mnt/rekindle"],
        "continuous-training.yaml",
    ),
    "vertex": (
        [
            word
            for value in (
                "project=my-project",
                "region=europe-west4",
                "artifact_root=gs://bucket/rekindle",
                f"image={IMAGE}",
            )
            for word in ("--set", f"platforms.vertex.{value}")
        ],
        "continuous-training.vertex.json",
    ),
    "sagemaker": (
        [
            word
            for value in (
                "region=eu-central-1",
                "role_arn=arn:aws:iam::123456789012:role/me",
                "artifact_root=s3://bucket/rekindle",
                f"image={ECR}",
            )
            for word in ("--set", f"platforms.sagemaker.{value}")
        ],
        "continuous-training.sagemaker.json",
    ),
}


def sagemaker(**settings):
    """Words that compile the digits job for SageMaker with some settings changed."""
    words, _ = PLATFORMS["sagemaker"]
    changed = [
        w
        for name, value in settings.items()
        for w in ("--set", f"{name.replace('__', '.')}={value}")
    ]
    return ["--platform", "sagemaker", *words, *TRACKED, *changed]
