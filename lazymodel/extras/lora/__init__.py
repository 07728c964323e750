"""LoRA adapters of PEFT: opened, merged into checkpoints while they are read, or kept."""
