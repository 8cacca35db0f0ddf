"""How a reward function is called: its arguments, async functions, time and memory limits, and what it may return."""
