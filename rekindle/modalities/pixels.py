"""Images as uint8 pixels, row by row, channels last: of encoded bytes or lists of numbers.

The first image decides height, width and channels (1 grey, 3 colour), unless
`data.image_size` scales all. A grey image among coloured ones becomes coloured; a
coloured one among grey ones is refused. Alpha and palettes become RGB, and EXIF rotation
is applied."""

import io
import math
import struct

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from PIL import ExifTags, Image, UnidentifiedImageError

from rekindle.rows.findings import Findings

Pixels = npt.NDArray[np.uint8]
_UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    Image.DecompressionBombError,
    EOFError,
    struct.error,
)
# by the orientation that EXIF 2.3 tells; 1 is upright
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class PixelError(ValueError):
    """Numbers that are not pixels."""


class ImageColumn:
    """Turns values into pixels of one shape, and remembers it:
    height, width, channels."""

    def __init__(self, size: tuple[int, int] | None) -> None:
        self._size = size
        self.shape: tuple[int, int, int] | None = None

    def pixels(self, value: object, place: str, findings: Findings) -> bytes | None:
        """The pixels of an image as bytes, or None where it was refused and noted."""
        try:
            image = to_pixels(value, self._size)
            if self._size is not None and image.shape[:2] != self._size:
                height, width = self._size
                # Pillow takes grey images without a dimension for channels
                plain = image[:, :, 0] if image.shape[2] == 1 else image
                picture = Image.fromarray(plain)
                image = _array(picture.resize((width, height), Image.Resampling.BILINEAR))
        except _UNREADABLE as error:
            kind = "pixel" if isinstance(error, PixelError) else "image"
            findings.add(kind, place, str(error))
            return None
        if self.shape is None:
            self.shape = (image.shape[0], image.shape[1], image.shape[2])
        if image.shape[2] < self.shape[2]:
            image = np.repeat(image, self.shape[2], axis=2)
        if image.shape[2] > self.shape[2]:
            findings.add("image colour", place)
            return None
        if image.shape != self.shape:
            height, width, _ = image.shape
            first_height, first_width, _ = self.shape
            sizes = f"{height}x{width}, the first is {first_height}x{first_width}"
            findings.add("image size", place, sizes)
            return None
        return image.tobytes()


def to_pixels(value: object, size: tuple[int, int] | None = None) -> Pixels:
    """An image, [height, width, channels].
    Raises PixelError for numbers, OSError, ValueError."""
    if isinstance(value, pa.Scalar):
        is_list = pa.types.is_nested(value.type) and not pa.types.is_struct(value.type)
        # a list of numbers without a Python object each, a list of lists with them
        if is_list and not pa.types.is_nested(value.values.type):
            value = value.values.to_numpy(zero_copy_only=False)
        else:
            value = value.as_py()
    if isinstance(value, dict):  # as `datasets` stores images
        value = value.get("bytes")
    if value is None:
        raise ValueError("none")
    if not isinstance(value, bytes):
        return _from_numbers(value, size)
    try:
        file = Image.open(io.BytesIO(value))
    except UnidentifiedImageError:
        raise ValueError("no image of a known kind") from None
    with file as opened:
        if opened.mode.startswith(("I", "F")):
            raise ValueError(f"mode {opened.mode}: more than 8 bits a channel; convert it to 8")
        # not by ImageOps.exif_transpose, which writes
        # all tags again, and fails of an odd one
        turn = _TURNS.get(opened.getexif().get(ExifTags.Base.Orientation, 1))
        picture = opened if turn is None else opened.transpose(turn)
        is_grey = picture.mode in ("1", "L")
        return _array(picture.convert("L" if is_grey else "RGB"))


def _array(picture: Image.Image) -> Pixels:
    pixels = np.asarray(picture, np.uint8)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _from_numbers(value: object, size: tuple[int, int] | None) -> Pixels:
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise PixelError(f"no list of numbers of one shape: {value!r}") from None
    if not np.isfinite(numbers).all():
        first = np.argmin(np.isfinite(numbers.ravel()))
        raise PixelError(f"{first} of {numbers.size} is not a number")
    if not numbers.size:
        raise PixelError("numbers none, not whole from 0 to 255")
    is_whole = (numbers == np.floor(numbers)).all()
    if not is_whole or numbers.min() < 0 or numbers.max() > 255:
        span = f"{numbers.min():g} to {numbers.max():g}"
        raise PixelError(f"numbers {span}, not whole from 0 to 255")
    pixels = numbers.astype(np.uint8)
    if pixels.ndim == 1:  # give a flat list its height and width
        side = math.isqrt(pixels.size)
        height, width = size or (side, side)
        if pixels.size % (height * width):
            message = f"{pixels.size} numbers make no square image; "
            raise PixelError(message + "nest them or set data.image_size")
        pixels = pixels.reshape(height, width, -1)
    elif pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise PixelError(f"shape {list(pixels.shape)}, not height x width x 1 or 3")
    return pixels
