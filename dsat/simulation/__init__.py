"""DeepSpeed's own engine on fake tensors, inside the user's script: what memory is predicted from.

Runs in a process of its own; nothing here allocates what the model would need.
"""
