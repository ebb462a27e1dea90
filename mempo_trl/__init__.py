"""MemPO (Self-Memory Policy Optimization) for TRL."""

from .config import MemPOConfig
from .data.questions import load_questions
from .memory_reward import MemoryRewardCallback, RolloutCallback
from .retrieval.bm25 import BM25Retriever
from .retrieval.tool import SearchTool
from .rollout import Rollout, Turn
from .trainer import MemPOTrainer


__version__ = "0.1.0.dev0"

__all__ = [
    "BM25Retriever",
    "MemPOConfig",
    "MemPOTrainer",
    "MemoryRewardCallback",
    "Rollout",
    "RolloutCallback",
    "SearchTool",
    "Turn",
    "load_questions",
]
