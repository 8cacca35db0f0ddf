"""Write a policy: a folder that `load_policy` and transformers read, or a repository of the hub."""

import os
import tempfile
from pathlib import Path
from typing import Any

from rlkit.adapters import REFERENCE_ADAPTER
from rlkit.causal_lm import causal_lm_of
from rlkit.distributed import collectives
from rlkit.distributed.sharding import fsdp_modules


def save_pretrained(policy: Any, folder: str | os.PathLike[str], **kwargs: Any) -> None:
    """`Policy.save_pretrained`: sharded weights are gathered, and the main process writes."""
    if fsdp_modules(policy.local_scorer):  # also inside `gathered`, state_dict() gives shards
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        kwargs = {"state_dict": get_model_state_dict(policy.model, options=options)} | kwargs
    with policy.without_gradient():
        if collectives.rank() == 0:
            _write(policy, folder, **kwargs)
    collectives.barrier()


def _write(policy: Any, folder: str | os.PathLike[str], **kwargs: Any) -> None:
    config = getattr(causal_lm_of(policy.model), "generation_config", None)
    own = getattr(config, "eos_token_id", None)
    if config is not None:
        config.eos_token_id = list(policy.eos_ids)  # also the ids that only load_policy(eos_ids=...) named
    if hasattr(policy.model, "peft_config"):  # not the frozen adapter that is the policy's reference
        names = [name for name in policy.model.peft_config if name != REFERENCE_ADAPTER]
        kwargs = {"selected_adapters": names} | kwargs
    try:
        policy.model.save_pretrained(folder, **kwargs)
    finally:
        if config is not None:
            config.eos_token_id = own
    policy.tokenizer.save_pretrained(folder)


def push_to_hub(policy: Any, repo_id: str, *, method: str, run: Any, private: bool | None, **kwargs: Any) -> None:
    """`Policy.push_to_hub`: save to a temporary folder, add a model card, and upload the folder."""
    from huggingface_hub import HfApi

    from rlkit.run.model_card import model_card

    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(folder)
        if collectives.rank() == 0:
            card = model_card(policy, method=method, run=run)
            Path(folder, "README.md").write_text(card, encoding="utf-8")
            api = HfApi(token=kwargs.pop("token", None))
            api.create_repo(repo_id, private=private, exist_ok=True)
            api.upload_folder(repo_id=repo_id, folder_path=folder, **kwargs)
