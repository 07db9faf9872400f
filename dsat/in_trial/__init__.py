"""Code that runs inside the user's training process: ranks, meter, functions for scripts.

The modules import torch, DeepSpeed, transformers or determined only where they use them, so that
importing a module of this folder stays cheap.
"""
