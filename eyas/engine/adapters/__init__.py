"""LoRA adapters: their folders, the matrices that they update, and which of them are on the device."""
