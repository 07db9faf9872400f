"""Code that runs inside the user's training process: the meter, the helpers scripts call, ranks.

Imports torch, DeepSpeed, transformers or determined only where they are used: importing a module
of this folder must stay cheap.
"""
