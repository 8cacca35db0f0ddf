"""What an exported script calls when it runs: its flags, its start, `await` at the top and `display`."""
