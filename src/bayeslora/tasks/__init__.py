"""Tasks: questions with options or free answers, texts to classify, conversations, running text, problems with solutions;
from public benchmarks, own files, the hub, or a seed.

Example:
    >>> task = load_task("urns")
    >>> item = task.test[0]
    >>> len(item.options) == len(item.probabilities)
    True
"""

from bayeslora.tasks.answers import AnswerTask, FreeQuestion
from bayeslora.tasks.base import SPLITS, Item, Prompt, Split, SplitName, Task, require_gold
from bayeslora.tasks.encode import EncodedItem, Questions, Scoring, continuations, encode_item, encode_items
from bayeslora.tasks.file import make_item, read_items
from bayeslora.tasks.own import OwnFormat
from bayeslora.tasks.problems import Problem, ProblemTask
from bayeslora.tasks.registry import TASKS, find_task, load_task, require_options
from bayeslora.tasks.text import TextTask
from bayeslora.tasks.tokens import EncodedText, TokenTask
from bayeslora.tasks.urns import distance_to_truth, make_urns, truth_entropy, urns_task

__all__ = [
    "SPLITS",
    "TASKS",
    "AnswerTask",
    "EncodedItem",
    "EncodedText",
    "FreeQuestion",
    "Item",
    "OwnFormat",
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
    "find_task",
    "load_task",
    "make_item",
    "make_urns",
    "read_items",
    "require_gold",
    "require_options",
    "truth_entropy",
    "urns_task",
]
