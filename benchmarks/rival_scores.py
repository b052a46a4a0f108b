"""Scores of uqlm and lm-polygraph for generated answers, by their published formulas.

Every score here is a confidence: more means surer. lm-polygraph's estimators are uncertainties, so they appear with the other
sign. Where a package would load a model from a hub to compare answers, answers are grouped as bayeslora groups them, or
compared by their words; the note of the score says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayeslora.predict.generation.agreement import group_answers

TOP = 15
"""Alternatives at every token of which uqlm takes the entropy."""

OUR_GROUPS = "our grouping"
LEAST = 1e-300


@dataclass(frozen=True)
class Sample:
    """A sampled answer with the log-probabilities of its tokens."""

    text: str
    log_probabilities: tuple[float, ...]

    @property
    def log_probability(self) -> float:
        """Of the whole answer."""
        return math.fsum(self.log_probabilities)

    @property
    def mean(self) -> float:
        """Log-probability per token."""
        return self.log_probability / max(1, len(self.log_probabilities))


@dataclass(frozen=True)
class Answered:
    """A question that a model has answered, with all that scores are computed from.

    Attributes:
        id: of the question.
        answer: decoded greedily, with the log-probabilities of its tokens.
        right: whether it is accepted.
        f1: its overlap in words with an accepted answer.
        entropies: of the distribution of each of its tokens, in nats.
        top: log-probabilities of the most probable tokens at each of its tokens, the best first.
        samples: answers sampled at temperature 1.
        log_true: log-probability that the model calls the answer true.
    """

    id: str
    answer: Sample
    right: bool
    f1: float
    entropies: tuple[float, ...]
    top: tuple[tuple[float, ...], ...]
    samples: tuple[Sample, ...]
    log_true: float

    @property
    def texts(self) -> list[str]:
        """The sampled answers."""
        return [sample.text for sample in self.samples]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Answered:
        """Restore from :meth:`to_dict`."""
        made = dict(values)
        made["answer"] = _sample(made["answer"])
        made["samples"] = tuple(map(_sample, made["samples"]))
        made["entropies"] = tuple(made["entropies"])
        made["top"] = tuple(map(tuple, made["top"]))
        return cls(**made)


def _sample(values: Mapping[str, Any]) -> Sample:
    return Sample(values["text"], tuple(values["log_probabilities"]))


@dataclass(frozen=True)
class Score:
    """A way to score answers.

    Attributes:
        name: as the package calls it.
        package: that offers it.
        score: its formula.
        samples: whether it needs sampled answers.
        asks: whether it asks the model about its answer.
        probability: whether it is a probability, or is meant as one.
        note: how it differs from the package.
    """

    name: str
    package: str
    score: Callable[[Answered], float]
    samples: bool = False
    asks: bool = False
    probability: bool = False
    note: str = ""

    @property
    def key(self) -> str:
        """Its name with that of its package."""
        return f"{self.package}: {self.name}"


# Of the answer alone --------------------------------------------------------------------------------------------------


def sequence_probability(it: Answered) -> float:
    """Geometric mean of the tokens' probabilities."""
    return math.exp(it.answer.mean)


def least_probability(it: Answered) -> float:
    """Probability of the least probable token."""
    return math.exp(min(it.answer.log_probabilities, default=0.0))


def log_probability(it: Answered) -> float:
    """Log-probability of the answer."""
    return it.answer.log_probability


def mean_log_probability(it: Answered) -> float:
    """Log-probability per token."""
    return it.answer.mean


def mean_token_entropy(it: Answered) -> float:
    """Mean entropy of the tokens' distributions, negated."""
    return -_mean(it.entropies)


def token_negentropies(it: Answered) -> list[float]:
    """For each token, 1 less the entropy among the most probable tokens as a share of the largest possible."""
    found = []
    for best in it.top:
        p = np.exp(best)
        p = p / p.sum()
        found.append(1.0 - float(-(p * np.log(np.maximum(p, LEAST))).sum()) / math.log(len(p)))
    return found or [1.0]


def mean_token_negentropy(it: Answered) -> float:
    """Mean over the tokens."""
    return _mean(token_negentropies(it))


def least_token_negentropy(it: Answered) -> float:
    """Of the least certain token."""
    return min(token_negentropies(it))


def probability_margin(it: Answered) -> float:
    """Mean difference of the two largest probabilities at each token."""
    return _mean([math.exp(best[0]) - math.exp(best[1]) for best in it.top])


def called_true(it: Answered) -> float:
    """Probability of the word True when the model is asked whether its answer is."""
    return it.log_true


# Of sampled answers ---------------------------------------------------------------------------------------------------


def exact_match_rate(it: Answered) -> float:
    """Share of the samples that are the answer to the letter."""
    return _mean([float(text == it.answer.text) for text in it.texts])


def all_answers(it: Answered) -> list[Sample]:
    """The answer and the samples."""
    return [it.answer, *it.samples]


def negentropy(groups: Sequence[Sequence[int]], weights: Sequence[float]) -> float:
    """1 less the entropy over groups as a share of the largest possible, which is that of answers that all differ."""
    mass = np.array([sum(weights[index] for index in group) for group in groups])
    p = mass / mass.sum() if mass.sum() > 0 else np.full(len(mass), 1 / len(mass))
    entropy = abs(float((p * np.log(np.maximum(p, LEAST))).sum()))
    return 1.0 - entropy / math.log(max(2, len(weights)))


def semantic_negentropy(it: Answered) -> float:
    """Of groups by the number of their answers."""
    given = all_answers(it)
    return negentropy(group_answers([sample.text for sample in given]), [1.0] * len(given))


def weighted_negentropy(it: Answered) -> float:
    """Of groups by the length-normalised probabilities of their answers."""
    given = all_answers(it)
    return negentropy(group_answers([sample.text for sample in given]), [math.exp(sample.mean) for sample in given])


def semantic_sets_confidence(it: Answered) -> float:
    """From 1, if all answers are one group, to 0, if all differ."""
    groups = len(group_answers([sample.text for sample in all_answers(it)]))
    return (len(it.samples) + 1 - groups) / len(it.samples)


def monte_carlo_probability(it: Answered) -> float:
    """Mean length-normalised probability of the answer and the samples."""
    return _mean([math.exp(sample.mean) for sample in all_answers(it)])


def monte_carlo_entropy(it: Answered) -> float:
    """Mean log-probability of the samples, which estimates the negative entropy."""
    return _mean([sample.log_probability for sample in it.samples])


def monte_carlo_normalised_entropy(it: Answered) -> float:
    """The same, per token."""
    return _mean([sample.mean for sample in it.samples if sample.log_probabilities])


def semantic_entropy(it: Answered) -> float:
    """Mean over the samples of the log-probability of their group, which is the sum over the group's samples."""
    logs = np.array([sample.log_probability for sample in it.samples])
    groups = [np.array(group) for group in group_answers(it.texts)]
    return sum(len(group) * float(np.logaddexp.reduce(logs[group])) for group in groups) / len(logs)


def empirical_semantic_entropy(it: Answered) -> float:
    """Entropy over the groups by the number of their samples, negated."""
    shares = [len(group) / len(it.samples) for group in group_answers(it.texts)]
    return math.fsum(share * math.log(share) for share in shares)


def semantic_sets(it: Answered) -> float:
    """Number of groups, negated."""
    return -float(len(group_answers(it.texts)))


def lexical_similarity(it: Answered) -> float:
    """Mean similarity of two samples, by their longest common sequence of words."""
    return _mean([common_sequence(a, b) for a, b in combinations(it.texts, 2)])


def words_of(text: str) -> list[str]:
    """Words of letters and digits, in lower case."""
    return re.findall(r"[a-z0-9]+", text.lower())


def common_sequence(left: str, right: str) -> float:
    """ROUGE-L: harmonic mean of the shares that the longest common subsequence has of either text."""
    a, b = words_of(left), words_of(right)
    if not a or not b:
        return 0.0
    lengths = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for column, other in enumerate(b, start=1):
            above = lengths[column]
            lengths[column] = before + 1 if word == other else max(above, lengths[column - 1])
            before = above
    return 2.0 * lengths[-1] / (len(a) + len(b))


def similarities(texts: Sequence[str]) -> NDArray[np.float64]:
    """Jaccard similarities ``[S, S]`` of the sets of words."""
    sets = [set(text.lower().split()) for text in texts]
    made = np.eye(len(sets))
    for (i, a), (j, b) in combinations(enumerate(sets), 2):
        made[i, j] = made[j, i] = len(a & b) / len(a | b) if a | b else 0.0
    return made


def laplacian(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Normalised Laplacian of a graph with these weights."""
    scale = 1.0 / np.sqrt(weights.sum(axis=1))
    return np.asarray(np.eye(len(weights)) - scale[:, None] * weights * scale[None, :])


def degree_matrix(it: Answered) -> float:
    """Mean dissimilarity of two samples, negated."""
    return float(similarities(it.texts).mean()) - 1.0


def eccentricity(it: Answered, below: float = 0.9) -> float:
    """Distance of the samples from their centre in the space of the Laplacian's lowest eigenvectors, negated."""
    values, vectors = np.linalg.eigh(laplacian(similarities(it.texts)))
    kept = vectors[:, values < below]
    return -float(np.linalg.norm(kept - kept.mean(axis=0)))


def eigenvalue_sum(it: Answered) -> float:
    """How many groups the graph seems to have, negated: the sum of ``1 - λ`` over the Laplacian's eigenvalues below 1."""
    values = np.linalg.eigvalsh(laplacian(similarities(it.texts)))
    return -float(np.maximum(0.0, 1.0 - values).sum())


def dissimilarity(it: Answered) -> float:
    """Mean dissimilarity of the samples to the answer, by their longest common sequence of words."""
    return 1.0 - _mean([common_sequence(it.answer.text, text) for text in it.texts])


def cocoa_probability(it: Answered) -> float:
    """Log-probability of the answer times its mean dissimilarity."""
    return it.answer.log_probability * dissimilarity(it)


def cocoa_perplexity(it: Answered) -> float:
    """Log-probability per token times the mean dissimilarity."""
    return it.answer.mean * dissimilarity(it)


def consistency_and_confidence(it: Answered) -> float:
    """Mean similarity of the samples to the answer times its length-normalised probability."""
    return (1.0 - dissimilarity(it)) * sequence_probability(it)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


UQLM, POLYGRAPH = "uqlm", "lm-polygraph"
UNSTEMMED = "words not stemmed"
ROUGE = "similarity by ROUGE-L, not by a model"

SCORES: tuple[Score, ...] = (
    Score("sequence_probability", UQLM, sequence_probability, probability=True),
    Score("min_probability", UQLM, least_probability, probability=True),
    Score("mean_token_negentropy", UQLM, mean_token_negentropy, probability=True),
    Score("min_token_negentropy", UQLM, least_token_negentropy, probability=True),
    Score("probability_margin", UQLM, probability_margin, probability=True),
    Score("exact_match", UQLM, exact_match_rate, samples=True, probability=True),
    Score("semantic_negentropy", UQLM, semantic_negentropy, samples=True, probability=True, note=OUR_GROUPS),
    Score("white-box semantic_negentropy", UQLM, weighted_negentropy, samples=True, probability=True, note=OUR_GROUPS),
    Score("semantic_sets_confidence", UQLM, semantic_sets_confidence, samples=True, probability=True, note=OUR_GROUPS),
    Score("monte_carlo_probability", UQLM, monte_carlo_probability, samples=True, probability=True),
    Score("consistency_and_confidence", UQLM, consistency_and_confidence, samples=True, probability=True, note=ROUGE),
    Score("MaximumSequenceProbability", POLYGRAPH, log_probability),
    Score("Perplexity", POLYGRAPH, mean_log_probability),
    Score("MeanTokenEntropy", POLYGRAPH, mean_token_entropy),
    Score("PTrue", POLYGRAPH, called_true, asks=True),
    Score("MonteCarloSequenceEntropy", POLYGRAPH, monte_carlo_entropy, samples=True),
    Score("MonteCarloNormalizedSequenceEntropy", POLYGRAPH, monte_carlo_normalised_entropy, samples=True),
    Score("SemanticEntropy", POLYGRAPH, semantic_entropy, samples=True, note=OUR_GROUPS),
    Score("SemanticEntropyEmpirical", POLYGRAPH, empirical_semantic_entropy, samples=True, note=OUR_GROUPS),
    Score("LexicalSimilarity_rougeL", POLYGRAPH, lexical_similarity, samples=True, note=UNSTEMMED),
    Score("NumSemSets", POLYGRAPH, semantic_sets, samples=True, note=OUR_GROUPS),
    Score("DegMat_Jaccard_score", POLYGRAPH, degree_matrix, samples=True),
    Score("Eccentricity_Jaccard_score", POLYGRAPH, eccentricity, samples=True),
    Score("EigValLaplacian_Jaccard_score", POLYGRAPH, eigenvalue_sum, samples=True),
    Score("CocoaMSP", POLYGRAPH, cocoa_probability, samples=True, note=ROUGE),
    Score("CocoaPPL", POLYGRAPH, cocoa_perplexity, samples=True, note=ROUGE),
)
"""All scores. Left out is what needs a model from a hub: noncontradiction, entailment, BERTScore, cosine similarity and
semantic density of uqlm, and lm-polygraph's estimators with NLI scores."""
