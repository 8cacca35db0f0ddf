"""A client in a process of its own, for the tests that kill it, and for two ranks under torchrun.

python client_program.py forever URL FOLDER        trains until it is killed; prints a line for each step
torchrun ... client_program.py ranks URL FOLDER OUT  two steps with the prompts shared; writes what each rank drew
python client_program.py serve FOLDER              starts a server and waits
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from engines.vllm.server_helpers import CONTEXT, train, two_steps

import rlkit as rl


def forever(url, folder):
    policy = rl.load_policy(folder, device="cpu")
    policy.use(rl.VLLMServer(policy, url=url))
    while True:
        train(policy, 1)
        print("step", flush=True)


def ranks(url, folder, out):
    world = rl.setup(seed=0)
    found = two_steps(world, url, folder)
    Path(out, f"rank{world.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def serve(folder):
    with rl.serve(folder, max_model_len=CONTEXT):
        time.sleep(3600)


if __name__ == "__main__":
    {"forever": forever, "ranks": ranks, "serve": serve}[sys.argv[1]](*sys.argv[2:])
