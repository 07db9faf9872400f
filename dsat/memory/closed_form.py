from dataclasses import dataclass
class ModelFacts: pass
