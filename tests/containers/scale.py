"""A module that a task of one's own imports."""

import numpy as np


def scaled(raw):
    return raw.astype(np.float32) / 255
