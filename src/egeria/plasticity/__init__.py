"""How far a layer module's activations have moved from the reference's: one number per evaluation."""

from egeria.plasticity.metrics import (
    GRAM_FORMS,
    METRICS,
    Metric,
    cosine_distance,
    find_metric,
    flatten_rows,
    gram,
    input_norm,
    l2_distance,
    linear_cka_distance,
    pool_map,
    relative_sp_loss,
    relative_sp_loss_of_grams,
    sp_loss,
    sp_loss_of_grams,
)

__all__ = [
    "GRAM_FORMS",
    "METRICS",
    "Metric",
    "cosine_distance",
    "find_metric",
    "flatten_rows",
    "gram",
    "input_norm",
    "l2_distance",
    "linear_cka_distance",
    "pool_map",
    "relative_sp_loss",
    "relative_sp_loss_of_grams",
    "sp_loss",
    "sp_loss_of_grams",
]
