"""The user's input, read and checked: DeepSpeed and experiment configurations, commands.

May read files; starts no process, and imports neither torch nor DeepSpeed.
"""
