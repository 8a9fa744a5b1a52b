"""What tests share with data/test_images.py."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def png(pixels, mode=None):
    sink = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8), mode).save(sink, "PNG")
    return sink.getvalue()
