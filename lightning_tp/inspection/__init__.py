"""The command `lightning-tp inspect`: what of a model is split, what stays whole, and why."""
