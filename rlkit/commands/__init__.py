"""The subcommands of `rlkit`, one a module: `add_parser` declares the arguments, `run` does the work and returns the
exit status (0; 1 where it did not work; 2 for a command line that cannot be meant).

`rlkit --help` reads all of these modules, so what is heavy is imported inside `run`.
"""
