"""TRL is imported once; `Trainer.train` collects garbage each time, so what its imports left is set aside too."""

import gc
import os

import pytest


@pytest.fixture(scope="package", autouse=True)
def trl():
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import trl.experimental.a2po
    from trl import RLOOTrainer

    gc.collect()
    gc.freeze()  # see tests/conftest.py
    return RLOOTrainer, trl.experimental.a2po.A2POTrainer
