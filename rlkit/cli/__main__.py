"""`python -m rlkit.cli`."""

from rlkit.cli import main

if __name__ == "__main__":
    main()
