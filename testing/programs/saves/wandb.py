"""In place of Weights & Biases: says in which mode it would track."""


def init(project: str, mode: str) -> str:
    return mode
