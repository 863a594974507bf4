"""Confidence intervals (95%) of evaluation scores and of differences between models on the same samples.

Where all samples are 0 or 1, the normal interval is empty at 0 of 30, although the next may well be right, and leaves
[0, 1] near the ends; the score intervals of Wilson (1927) and Newcombe (1998) do neither.
"""

import math
import statistics

Interval = tuple[float, float]
"""Lower and upper end of a confidence interval."""

QUANTILE_95 = statistics.NormalDist().inv_cdf(0.975)
SAME_ERROR = 1e-6
"""Relative difference below which two standard errors count as equal, since scores are rounded."""


def wilson(share: float, num_samples: int) -> Interval:
    """Return Wilson's interval for a proportion of `num_samples` independent samples (JASA 22, 209-212)."""
    z2 = QUANTILE_95**2
    middle = (share + z2 / (2 * num_samples)) / (1 + z2 / num_samples)
    variance = share * (1 - share) / num_samples + z2 / (4 * num_samples**2)
    margin = QUANTILE_95 * math.sqrt(variance) / (1 + z2 / num_samples)
    return max(0.0, middle - margin), min(1.0, middle + margin)


def newcombe(both: int, only_first: int, only_second: int, neither: int) -> Interval:
    """Return Newcombe's interval for the difference of two models' proportions of right answers to the same samples.

    Method 10 of "Improved confidence intervals for the difference between binomial proportions based on paired data"
    (Statistics in Medicine 17, 2635-2650): Wilson's intervals, combined with their correlation.
    """
    num_samples = both + only_first + only_second + neither
    first, second = (both + only_first) / num_samples, (both + only_second) / num_samples
    (first_low, first_high), (second_low, second_high) = (wilson(share, num_samples) for share in (first, second))
    product: float = both * neither - only_first * only_second
    if product > 0:  # the continuity correction of a positive correlation
        product = max(product - num_samples / 2, 0.0)
    scale = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    correlation = product / math.sqrt(scale) if scale else 0.0

    def margin(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a**2 - 2 * correlation * a * b + b**2))

    difference = first - second
    return (
        difference - margin(first - first_low, second_high - second),
        difference + margin(first_high - first, second - second_low),
    )


def student_t(mean: float, standard_error: float, num_samples: int) -> Interval:
    """Return Student's t interval for the mean of at least two independent samples."""
    from scipy.special import stdtrit  # takes 0.1 s

    margin = float(stdtrit(num_samples - 1, 0.975)) * standard_error
    return mean - margin, mean + margin


def score_interval(value: float, standard_error: float, num_samples: int | None) -> Interval:
    """Return a score's interval: Wilson's if every sample is right or wrong, else Student's t.

    Values from 0 to 1 have the standard error √(p (1 − p) / (n − 1)) if and only if all are 0 or 1. Without
    `num_samples`, the normal distribution's.
    """
    if num_samples is None or num_samples < 2:
        return value - QUANTILE_95 * standard_error, value + QUANTILE_95 * standard_error
    if 0 <= value <= 1:
        of_share = math.sqrt(value * (1 - value) / (num_samples - 1))
        if math.isclose(standard_error, of_share, rel_tol=SAME_ERROR, abs_tol=1e-12):
            return wilson(value, num_samples)
    return student_t(value, standard_error, num_samples)


NUM_CUT = "num_answers_cut"
"""Name of the metric that counts an evaluation's answers which reached the token limit and were cut there."""


def zero_score_warning(name: str, evaluation: str, num_samples: int, num_cut: int) -> str:
    """Return advice for a score of 0: most often prompts differ from training's. num_cut: answers at the limit."""
    cut = f" ({num_cut} answers reached max_gen_toks and were cut there)" if num_cut else ""
    return (
        f"{name} is 0: of {num_samples} answers none was right{cut}. Read them: `lifecycle show {evaluation} "
        "--samples`. Is the model asked as it was trained (apply_chat_template, the task's prompt), and does it end an "
        "answer where the task expects it?"
    )
