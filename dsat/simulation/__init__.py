"""Prediction of memory by DeepSpeed's own engine on fake tensors, inside the user's script.

Runs in a process of its own; nothing here allocates what the model would need.
"""
