"""The digits as a Parquet file, and a config that learns them in seconds."""

import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_digits

CONFIG = """
name: digits
task: image_classification
data: {source: digits.parquet, columns: {key: id}, split: {train: 0.7, validation: 0.1, test: 0.2}}
model: {source: {channels: [16, 32], hidden: 64}}
train: {epochs: 6, lr: 3e-3}
evaluate: {floor: {accuracy: 0.9}}
platforms: {local: {ranks: 1}}
"""
WEAK = [
    "--set",
    "train.epochs=1",
    "--set",
    "train.lr=3e-4",
    "--set",
    "evaluate.floor={accuracy: 0.12}",
]


def write_digits(folder, labels=None):
    digits = load_digits()
    rows = {
        "id": [f"d{i}" for i in range(len(digits.target))],
        "image": [(image * 255 / 16).round().astype(int).tolist() for image in digits.images],
        "label": labels or [str(label) for label in digits.target],
    }
    pq.write_table(pa.table(rows), folder / "digits.parquet")
