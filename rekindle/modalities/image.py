"""An image with a label, as uint8 pixels; examples store them row by row, channels last."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from rekindle.modalities.base import InstanceError, JsonType, Modality, Question, Reader, Shape
from rekindle.modalities.labels import RowLabels
from rekindle.modalities.pixels import ImageColumn, Pixels
from rekindle.rows.columns import Mask, RawBatch, content_of, with_mask
from rekindle.rows.findings import Findings
from rekindle.spec.model import ColumnsSpec, DataSpec

_BRIGHTEST = 255.0


class Image(Modality[Pixels, bytes]):
    """Its content is an array [height, width, channels]."""

    field: ClassVar[pa.Field] = pa.field("image", pa.binary())
    label_type: ClassVar[pa.DataType | None] = pa.string()

    def reader(self, data: DataSpec, shape: Shape | None = None) -> Reader:
        return _ImageReader(data, shape)

    def stored(self, content: Pixels) -> bytes:
        return np.asarray(content, np.uint8).tobytes()

    def content(self, stored: bytes, shape: Shape | None = None) -> Pixels:
        return np.frombuffer(stored, np.uint8).reshape(shape or (-1,))

    def evidence(self, content: Pixels) -> str:
        """A PNG in base64."""
        from PIL import Image as Picture

        # PIL's grey images have no axis of channels
        plain = content[:, :, 0] if content.shape[2] == 1 else content
        file = io.BytesIO()
        Picture.fromarray(plain).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()

    def question(
        self,
        names: ColumnsSpec,
        settings: Mapping[str, Any],
        image_size: tuple[int, int] | None = None,
    ) -> ImageQuestion:
        trained_shape = settings.get("image_shape")
        if not trained_shape:
            return ImageQuestion(names.image)
        height, width, depth = trained_shape
        # the config says that images are scaled, the version to what
        size = (height, width) if image_size else None
        return ImageQuestion(names.image, size, (height, width, depth))

    def signals(self, content: Pixels, known: Collection[int]) -> dict[str, float]:
        """Mean and deviation of the pixels, over the brightest value."""
        return {
            "brightness": float(content.mean() / _BRIGHTEST),
            "contrast": float(content.std() / _BRIGHTEST),
        }


class _ImageReader(Reader):
    def __init__(self, data: DataSpec, shape: Shape | None) -> None:
        self._column = data.columns.image
        self._labels = RowLabels(data)
        self._images = ImageColumn(data.image_size)
        self._images.shape = shape
        self.columns = self._labels.beside(self._column, "image")

    @property
    def shape(self) -> Shape | None:
        return self._images.shape

    def content(self, raw: RawBatch, findings: Findings) -> tuple[pa.Array, Mask]:
        pixels: list[bytes | None] = []
        for row, value in enumerate(raw.columns[self._column]):
            try:
                value = content_of(raw, value)
            except (OSError, ValueError) as error:
                findings.add("image", raw.place(row), str(error))
                pixels.append(None)
                continue
            pixels.append(self._images.pixels(value, raw.place(row), findings))
        return with_mask(pixels, pa.binary())

    def labels(self, raw: RawBatch, findings: Findings) -> tuple[pa.Array, Mask]:
        return self._labels.read(raw, findings)


@dataclasses.dataclass(frozen=True)
class ImageQuestion(Question[Pixels]):
    """`size` is what images are scaled to, if they are, `shape` what the model takes."""

    column: str
    size: tuple[int, int] | None = None
    shape: Shape | None = None
    json_type: ClassVar[JsonType] = "string"
    in_csv: ClassVar[bool] = False
    is_slow: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        kind = "an image"
        if self.shape is not None and self.size is None:
            height, width, depth = self.shape
            kind += f" of {height} x {width} x {depth}"
        return kind

    def content(self, value: object, place: str) -> Pixels:
        findings = Findings()
        images = ImageColumn(self.size)
        images.shape = self.shape
        if isinstance(value, str):
            try:
                # strict: lenient decoding skips letters that are not base64
                value = base64.b64decode(value, validate=True)
            except ValueError as error:
                message = f"{place}: an image is base64 of a file, or lists of numbers: {error}"
                raise InstanceError(message) from None
        pixels = images.pixels(value, place, findings)
        if pixels is None:
            problem = findings.problems()[0]
            raise InstanceError(f"{problem.where}: {problem.what}")
        return np.frombuffer(pixels, np.uint8).reshape(self.shape or (-1,))

    def values(self, raw: RawBatch, findings: Findings) -> Iterable[object]:
        for value in raw.columns[self.column]:
            yield content_of(raw, value)

    def value(self, evidence: str) -> str:
        return evidence
