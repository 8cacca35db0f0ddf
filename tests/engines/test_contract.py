"""The contract of every engine, for the default one."""

import pytest
from builders import vllm_policy
from engines.contract import EngineContract

import rlkit as rl


@pytest.fixture(scope="module")
def subject():
    return rl.TransformersEngine(vllm_policy())


class TestTransformersEngine(EngineContract):
    pass
