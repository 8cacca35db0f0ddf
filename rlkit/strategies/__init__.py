"""How a policy is updated and where its weights lie: one process, DDP, FSDP2, or ZeRO-3 through DeepSpeed."""
