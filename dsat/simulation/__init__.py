"""Prediction of memory by DeepSpeed's own engine on fake tensors.

The server runs in a process of the training script and allocates no weights; the client runs in
dsat's process.
"""
