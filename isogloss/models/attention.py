"""Which code computes a model's attention."""


# As transformers names them; "auto" is what it takes by itself: sdpa, else eager.
ATTENTIONS = "auto", "sdpa", "flash_attention_2", "eager"


def attention_options(attention):
    """Return the keyword arguments by which transformers takes one of ATTENTIONS."""
    return {} if attention == "auto" else {"attn_implementation": attention}
