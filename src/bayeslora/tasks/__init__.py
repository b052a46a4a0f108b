"""Tasks: questions with options, running text, problems with solutions; from public benchmarks, own files, or a seed.

Example:
    >>> task = load_task("urns")
    >>> item = task.test[0]
    >>> len(item.options) == len(item.probabilities)
    True
"""

from bayeslora.tasks.base import SPLITS, Item, Prompt, Split, SplitName, Task, require_gold
from bayeslora.tasks.encode import EncodedItem, Questions, Scoring, continuations, encode_item, encode_items
from bayeslora.tasks.file import file_task, make_item, read_items
from bayeslora.tasks.problems import Problem, ProblemTask
from bayeslora.tasks.registry import TASKS, TokenTask, find_task, load_task
from bayeslora.tasks.text import TextTask
from bayeslora.tasks.tokens import EncodedText
from bayeslora.tasks.urns import distance_to_truth, make_urns, truth_entropy, urns_task

__all__ = [
    "SPLITS",
    "TASKS",
    "EncodedItem",
    "EncodedText",
    "Item",
    "Problem",
    "ProblemTask",
    "Prompt",
    "Questions",
    "Scoring",
    "Split",
    "SplitName",
    "Task",
    "TextTask",
    "TokenTask",
    "continuations",
    "distance_to_truth",
    "encode_item",
    "encode_items",
    "file_task",
    "find_task",
    "load_task",
    "make_item",
    "make_urns",
    "read_items",
    "require_gold",
    "truth_entropy",
    "urns_task",
]
