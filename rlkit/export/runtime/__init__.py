"""The runtime of exported scripts: their flags, their start, `await` at the top level and `display`."""
