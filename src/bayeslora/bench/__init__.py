"""Time and memory, side by side with stock PEFT LoRA in one process."""
