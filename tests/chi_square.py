"""Are counts drawn from a distribution?"""

import numpy as np
import scipy.stats


def chi_square_p(counts: np.ndarray, expected_p: np.ndarray) -> float:
    """The p-value of Pearson's test; cells expected fewer than 5 times are taken together.

    0 where something was counted that cannot be.
    """
    if counts[expected_p == 0].sum():
        return 0.0
    expected = expected_p * counts.sum()
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) == 1:
        return 1.0
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(scipy.stats.chi2.sf(statistic, len(wanted) - 1))
