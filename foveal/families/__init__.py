"""One class a model family: everything between a user's words and pictures and the runner, chosen by `open_family`."""

from foveal.families.base import ChatOptions, Family, LoadOptions
from foveal.families.open import open_family

__all__ = ["ChatOptions", "Family", "LoadOptions", "open_family"]
