"""What the ranks of the tests have in common, imported and compiled once, in their server.

Else every rank imports 1,800 modules more on first use, compiles what transformers looks for in the
names of weights and loads numba's compiled functions, which costs it more than its test.  `freeze`
keeps the collector from touching, and so copying, all that they have in common.
"""

import gc
import warnings

import deepspeed
import hypothesis  # noqa: F401, as below: what the files of tests import
import pytest  # noqa: F401

import steps  # noqa: F401, and with it jobs.py and what they start
from isogloss import demo, distill  # noqa: F401
from isogloss.align import TokenTable
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.sample import TextEncoder

with warnings.catch_warnings():  # a rank of its own imports these later, if at all
    import datasets.io.generator  # noqa: F401
    import deepspeed.module_inject.auto_ep_layer  # noqa: F401
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import peft  # noqa: F401
    import scipy.io  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # probes them all
tokenizer = demo.byte_level_bpe(["warm"], 256)
shape = dict(hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1)
demo.llama(tokenizer, shape, 0)
encoder = TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), 9)
Collator(encoder, [PairOptions(encoder)])(["warm"])
gc.collect()
gc.freeze()
