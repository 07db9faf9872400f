"""Memory predictions by DeepSpeed's own engine on fake tensors.

The server runs in the training script's process, where large weights take no memory; the client
runs in dsat's process.
"""
