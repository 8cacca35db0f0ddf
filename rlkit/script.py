"""The path by which exported scripts import their runtime; it lives in `rlkit.export.runtime.script`."""

from rlkit.export.runtime.script import *  # noqa: F403 - the same names
