"""What the user asked for: the YAML, read, checked and frozen."""

from rekindle.spec.load import load_spec
from rekindle.spec.model import Spec

__all__ = ["Spec", "load_spec"]
