"""`dsat estimate`: the memory that each ZeRO stage and offloading needs."""
