"""Self-distillation of the exit head: data of the model's own, losses, training at any scale, search for the exit layer."""
