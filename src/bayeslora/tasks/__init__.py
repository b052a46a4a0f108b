"""Tasks: questions with options, from public benchmarks, from your own files, or made from a seed.

Example:
    >>> task = load_task("urns")
    >>> item = task.test[0]
    >>> len(item.options) == len(item.probabilities)
    True
"""

from bayeslora.tasks.base import SPLITS, Item, Prompt, Split, SplitName, Task, require_gold
from bayeslora.tasks.encode import EncodedItem, Questions, Scoring, continuations, encode_item, encode_items
from bayeslora.tasks.file import file_task, make_item, read_items
from bayeslora.tasks.registry import TASKS, load_task
from bayeslora.tasks.urns import distance_to_truth, make_urns, truth_entropy, urns_task

__all__ = [
    "SPLITS",
    "TASKS",
    "EncodedItem",
    "Item",
    "Prompt",
    "Questions",
    "Scoring",
    "Split",
    "SplitName",
    "Task",
    "continuations",
    "distance_to_truth",
    "encode_item",
    "encode_items",
    "file_task",
    "load_task",
    "make_item",
    "make_urns",
    "read_items",
    "require_gold",
    "truth_entropy",
    "urns_task",
]
