"""What vLLM's workers need to take weights from rlkit: `--worker-extension-cls rlkit.engines.worker.WeightLoader`.

vLLM adds the class to its own worker, and the server's `/collective_rpc` calls its methods by name, arguments as JSON.
A sync that raises half-way leaves layers without storage, and the next request kills the server (vLLM 0.32, the shared
study, trap 3). So everything is read and compared before a layer is touched; what still fails is caught, the layers get
their storage back, and the answer says that the weights are a mixture. Nothing here raises.

The names and shapes that a model must be given come from an empty copy of the transformers model that its config
describes; a tied head is among them, since vLLM on a CPU packs it apart and keeps the old one without a word (trap 1).
"""

import copy
import os
from typing import Any

import torch

from rlkit.engines.vllm.llm import clear_blocks, restore_layers
from rlkit.engines.vllm.parent_death import VARIABLE, die_with_parent
from rlkit.engines.weights import check_manifest, plain_manifest

if VARIABLE in os.environ:  # in a process of a server that rlkit has started, never in a notebook
    die_with_parent()

Shapes = dict[str, list[int]]


class WeightLoader:
    """Methods that become vLLM's worker's own."""

    def rlkit_describe(self) -> dict[str, Any]:
        """What this worker serves: dtype, limits, and the shape of every weight that a sync must bring.

        `shapes` is None where transformers has no class for the model; then only vLLM's own checks are left.
        """
        config = self.vllm_config  # type: ignore[attr-defined]
        model = config.model_config
        return {
            "protocol": 2,
            "model": model.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "vocab_size": model.get_vocab_size(),
            "quantization": model.quantization,
            "logprobs_mode": model.logprobs_mode,
            "max_logprobs": model.max_logprobs,
            "lora_rank": config.lora_config.max_lora_rank if config.lora_config else None,
            "shapes": self._rlkit_shapes(),
            # vLLM unties the config where the checkpoint has both tensors, and ties the model again if they are equal.
            "tied": bool(
                getattr(model.hf_text_config, "tie_word_embeddings", False)
                or getattr(model, "word_embeddings_untied_by_checkpoint", False)
            ),
            "mixed": getattr(self, "_rlkit_mixed", False),
        }

    def rlkit_clear_blocks(self) -> None:
        """Overwrite the cache of keys and values by zeros; no request may be alive."""
        clear_blocks(self)

    def rlkit_base_replaced(self, becomes: bool = False) -> dict[str, bool]:
        """`replaced` from the first time on that other base weights than those of the start have come, or come now.

        A dict, since vLLM makes a string of any other answer.
        """
        self._rlkit_replaced = becomes or getattr(self, "_rlkit_replaced", False)
        return {"replaced": self._rlkit_replaced}

    def rlkit_load(self, file: str) -> dict[str, Any]:
        """Load the weights of a safetensors file, all of them or none.

        Returns:
            ok; error, None if ok; mixed: True if some layers have new weights and some have old ones, so that the
            engine must not be used before a sync succeeds.
        """
        mixed = getattr(self, "_rlkit_mixed", False)
        try:
            weights = _read(file)
            expected = self._rlkit_shapes()
            if expected is not None:
                given = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
                check_manifest(given, {name: (tuple(shape), None) for name, shape in expected.items()}, "rlkit_load")
            restore_layers(self.model_runner.get_model())  # type: ignore[attr-defined]  # if someone else's failed
        except Exception as error:  # whatever it is: raised here, it would end the server
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "mixed": mixed}
        self.rlkit_base_replaced(True)
        try:
            self.reload_weights(weights_iterator=iter(weights.items()))  # type: ignore[attr-defined]
        except Exception as error:
            self._rlkit_mixed = True
            restore_layers(self.model_runner.get_model())  # type: ignore[attr-defined]
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "mixed": True}
        self._rlkit_mixed = False
        return {"ok": True, "error": None, "mixed": False}

    def _rlkit_shapes(self) -> Shapes | None:
        if not hasattr(self, "_rlkit_known_shapes"):
            self._rlkit_known_shapes = shapes_of_config(self.vllm_config.model_config.hf_config)  # type: ignore[attr-defined]
        return self._rlkit_known_shapes


def _read(file: str) -> dict[str, torch.Tensor]:
    if not os.path.isfile(file):
        raise FileNotFoundError(
            f"the server sees no file {file}. Client and server must see the same folder: give VLLMServer a folder= on "
            "a disk that both have."
        )
    from safetensors.torch import load_file

    return load_file(file)


def shapes_of_config(config: Any) -> Shapes | None:
    """Shape of every weight of the transformers model that a config describes, tied ones under each of their names.

    None where transformers has no class for it.
    """
    import transformers

    kind = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if kind is None or not hasattr(kind, "_from_config"):
        return None
    with torch.device("meta"):
        model = kind._from_config(copy.deepcopy(config))
    return {name: list(shape) for name, (shape, _) in plain_manifest(model).items()}
