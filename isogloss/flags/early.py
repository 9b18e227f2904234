"""Check --token_weights where it is more than the word early.

Tests: tests/test_config.py.
"""


def settled(cfg, usual):
    """Return --token_weights, in the one form of what it means; a run has one identity.

    Args:
        usual: half-life that the word early alone means, in learned tokens.
    Raises:
        ValueError: it means nothing, or a column that no entry of data names.
    """
    if cfg.token_weights == "column":
        if not cfg.has_weights:
            from isogloss.flags.other_names import MOVED

            raise ValueError("--token_weights column: of which column? name it as weight_key of an "
                             f"entry of data: {MOVED['weight_key'][1]}")
        return cfg.token_weights
    kind, _, number = cfg.token_weights.partition(":")
    try:
        half_life = float(number)
    except ValueError:
        half_life = 0.0
    if kind != "early" or not 0.1 <= half_life <= 1e9:
        raise ValueError(f"--token_weights {cfg.token_weights}: expected early, early:N (the "
                         "learned tokens after which a weight is half as large, 0.1 to 1e9) or "
                         "column")
    return "early" if half_life == usual else f"early:{half_life:.15g}"
