"""The scores of uqlm and lm-polygraph by the packages' own functions, where they can be imported.

What a package would compute with a model from a hub is given to it: our groups of answers in place of entailment, and
similarities by ROUGE-L in place of those of a cross-encoder.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rival_scores import POLYGRAPH, UQLM, Answered, all_answers, common_sequence

from bayeslora.predict.generation.agreement import group_answers

Use = Callable[[Sequence[Answered]], Sequence[float]]
"""Scores of many answers."""


def find_packages() -> dict[str, Any]:
    """Functions by the keys of the scores, and the packages' versions under ``versions``."""
    found: dict[str, Any] = {"versions": {}}
    for package, load in ((UQLM, load_uqlm), (POLYGRAPH, load_polygraph)):
        try:
            uses = load()
        except ImportError as error:
            print(f"{package}: by formula, since it cannot be imported ({error})")
            continue
        found["versions"][package] = f"{package} {importlib.metadata.version(package)}"
        found |= {f"{package}: {name}": use for name, use in uses.items()}
    return found


# uqlm -----------------------------------------------------------------------------------------------------------------


def load_uqlm() -> dict[str, Use]:
    """Its white-box scorers, the exact match and the two entropies."""
    box = importlib.import_module("uqlm.white_box")
    match = importlib.import_module("uqlm.black_box.match").MatchScorer
    entropies = importlib.import_module("uqlm.nli.entropy_utils")

    def single(name: str) -> Use:
        return lambda rows: box.SingleLogprobsScorer().evaluate([token_dicts(row) for row in rows])[name]

    def top(name: str) -> Use:
        return lambda rows: [
            box.TopLogprobsScorer(top_k_logprobs=len(row.top[0])).evaluate([token_dicts(row)])[name][0] for row in rows
        ]

    def sampled(rows: Sequence[Answered]) -> Sequence[float]:
        given = [[it.text for it in row.samples] for row in rows]
        logs = [[log_dicts(it.log_probabilities) for it in row.samples] for row in rows]
        answers = [row.answer.text for row in rows]
        scorer = box.SampledLogprobsScorer(scorers=["monte_carlo_probability"])
        found = scorer.evaluate(answers, given, [token_dicts(row) for row in rows], logs)
        return list(found["monte_carlo_probability"])

    def negentropy(weighted: bool) -> Use:
        def one(row: Answered) -> float:
            given = all_answers(row)
            logs = [log_dicts(it.log_probabilities) for it in given]
            by_tokens, uniform = entropies.compute_response_probabilities(logs, len(given))
            groups = group_answers([it.text for it in given])
            shares = entropies.compute_cluster_probabilities(by_tokens if weighted else uniform, groups)
            entropy = entropies.compute_semantic_entropy(shares)
            return 1.0 - float(entropies.normalize_entropy([entropy], len(row.samples))[0])

        return lambda rows: list(map(one, rows))

    return {
        **{name: single(name) for name in ("sequence_probability", "min_probability")},
        **{name: top(name) for name in ("mean_token_negentropy", "min_token_negentropy", "probability_margin")},
        "exact_match": lambda rows: match().evaluate([row.answer.text for row in rows], [row.texts for row in rows]),
        "monte_carlo_probability": sampled,
        "semantic_negentropy": negentropy(weighted=False),
        "white-box semantic_negentropy": negentropy(weighted=True),
    }


def log_dicts(values: Sequence[float]) -> list[dict[str, Any]]:
    """Tokens as an API returns them."""
    return [{"logprob": value} for value in values]


def token_dicts(row: Answered) -> list[dict[str, Any]]:
    """Tokens of the answer with their alternatives."""
    tokens = log_dicts(row.answer.log_probabilities)
    return [token | {"top_logprobs": log_dicts(best)} for token, best in zip(tokens, row.top, strict=True)]


# lm-polygraph ---------------------------------------------------------------------------------------------------------


def load_polygraph() -> dict[str, Use]:
    """Its estimators, of which an uncertainty is taken with the other sign."""
    known = importlib.import_module("lm_polygraph.estimators")
    made = {
        **{
            name: getattr(known, name)()
            for name in (
                "MaximumSequenceProbability",
                "Perplexity",
                "MeanTokenEntropy",
                "PTrue",
                "MonteCarloSequenceEntropy",
                "MonteCarloNormalizedSequenceEntropy",
                "SemanticEntropy",
                "NumSemSets",
                "CocoaMSP",
                "CocoaPPL",
            )
        },
        "SemanticEntropyEmpirical": known.SemanticEntropy(class_probability_estimation="frequency"),
        "LexicalSimilarity_rougeL": known.LexicalSimilarity(metric="rougeL"),
        **{
            f"{name}_Jaccard_score": getattr(known, name)(similarity_score="Jaccard_score")
            for name in ("DegMat", "Eccentricity", "EigValLaplacian")
        },
    }

    def confidence(estimator: Any) -> Use:
        return lambda rows: (-np.asarray(estimator(statistics(rows)), dtype=np.float64)).tolist()

    return {name: confidence(estimator) for name, estimator in made.items()}


def statistics(rows: Sequence[Answered]) -> Mapping[str, Any]:
    """What the estimators are computed from, under the names that they use."""
    groups = [group_answers(row.texts) for row in rows]
    homes = [{index: k for k, group in enumerate(found) for index in group} for found in groups]
    together = np.array([[[float(home[i] == home[j]) for j in home] for i in home] for home in map(ordered, homes)])
    return {
        "greedy_log_likelihoods": [list(row.answer.log_probabilities) for row in rows],
        "entropy": [list(row.entropies) for row in rows],
        "p_true": [row.log_true for row in rows],
        "sample_texts": [row.texts for row in rows],
        "sample_log_probs": [[it.log_probability for it in row.samples] for row in rows],
        "sample_tokens": [[list(it.log_probabilities) for it in row.samples] for row in rows],
        "semantic_classes_entail": {"class_to_sample": groups, "sample_to_class": homes},
        "semantic_matrix_entail": together,
        "semantic_matrix_contra": 1.0 - together,
        "greedy_sentence_similarity": [
            np.array([common_sequence(row.answer.text, text) for text in row.texts]) for row in rows
        ],
    }


def ordered(home: Mapping[int, int]) -> dict[int, int]:
    """The groups of samples in the order of the samples."""
    return dict(sorted(home.items()))
