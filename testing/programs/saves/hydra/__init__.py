"""In place of Hydra: its modules import each other and call one another as in hydra-core 1.3."""

from .main import main as main
