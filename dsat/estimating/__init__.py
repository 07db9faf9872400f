"""`dsat estimate`: predicted memory for each ZeRO stage and offloading."""
