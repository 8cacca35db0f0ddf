"""Which notebook is this? Front ends say it in different places, and some do not say it at all."""

from pathlib import Path

from rlkit.run.provenance import notebook_path


def this_notebook() -> Path:
    """The path of the notebook that runs, as far as its front end tells it.

    Raises:
        RuntimeError: it does not; the path must be given.
    """
    found = notebook_path()
    if found is None:
        raise RuntimeError(
            'rl.export: the front end does not say which notebook this is. Give its path: rl.export("my.ipynb"), and '
            "save the notebook first."
        )
    return found
