"""The contract of every engine, for the default one."""

import pytest
from engines.contract import EngineContract
from engines.engine_models import vllm_policy

import rlkit as rl


@pytest.fixture(scope="module")
def subject():
    return rl.TransformersEngine(vllm_policy())


class TestTransformersEngine(EngineContract):
    own_weights = False
