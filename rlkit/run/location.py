"""Home: the folder of a run. It is chosen when it is first needed, locked for this process, and never changes.

Until then nothing is on disk, so a view can be shown before the run begins. A folder that is not empty is not written
into: either its checkpoint is resumed, or a number is added to the name.
"""

import atexit
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.distributed import collectives
from rlkit.distributed.rank_output import move_output_to
from rlkit.run.folder import claimed_folder, numbered_folders, versions, write_json
from rlkit.run.lock import lock, unlock
from rlkit.run.manifest import newest_of
from rlkit.run.provenance import for_config, origin
from rlkit.support.process_state import current
from rlkit.support.text import say


class Home:
    """The folder of one run, the same on every process; `config` are the parameters to keep in `config.json`."""

    def __init__(self, wanted: Path, config: Mapping[str, Any]) -> None:
        self.wanted = current.folder_for(wanted)  # a script's command line may put it elsewhere
        self.folder: Path | None = None  # absolute; None while it is not chosen
        self._config = dict(config)

    @property
    def path(self) -> Path:
        """The folder, chosen now if it was not; every process must read it."""
        if self.folder is None and (found := self._resumed()) is not None:
            self._open(found)  # a script that was started with --resume writes before its loop resumes
        return self._claimed() if self.folder is None else self.folder

    def go_on_in(self, run: Path, *, wanted: bool) -> bool:
        """Choose the folder of a checkpoint if none is chosen and it is this run's (numbered or not) or `wanted`.

        Returns False if the run goes on from another run's checkpoint.
        """
        if self.folder is None and (wanted or self._is_mine(run)):
            self._open(run)
        return self.folder is not None and run.resolve() == self.folder.resolve()

    def _claimed(self) -> Path:
        folder = collectives.from_main(claimed_folder(self.wanted) if collectives.rank() == 0 else self.wanted)
        if folder != self.wanted.absolute():
            why = "is not empty" if self.wanted.exists() else "was used before, with a number"
            say(f"rlkit: {self.wanted} {why}, writing to {folder}")
        if collectives.rank() == 0:
            write_json(folder / "config.json", self._settings())
            (folder / "metrics.jsonl").touch()
        return self._open(folder)

    def _open(self, folder: Path) -> Path:
        if collectives.rank() == 0:
            lock(folder)
            atexit.register(unlock, folder)
        move_output_to(folder)
        self.folder = current.folder = folder.absolute()  # a notebook may change its working directory
        return self.folder

    def _resumed(self) -> Path | None:
        """Return the folder of the checkpoint of `--resume`, if it is this run's; the same on every process."""
        if current.resume is None:
            return None
        found = newest_of(self.wanted) if current.resume == "auto" else Path(os.path.abspath(current.resume))
        run = collectives.from_main(found.parent.parent if found is not None else None)
        return run if run is not None and self._is_mine(run) else None

    def _is_mine(self, run: Path) -> bool:
        known = {folder.resolve() for folder in numbered_folders(self.wanted)}
        return collectives.from_main(run.resolve() in known)

    def _settings(self) -> dict[str, Any]:
        found = origin()
        script = {"script": {**current.script, "processes": collectives.size()}} if current.script else {}
        parameters = {**found.pop("parameters", {}), **current.parameters, **self._config}
        return {"parameters": for_config(parameters), "versions": versions(), **found, **script}
