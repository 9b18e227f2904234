"""Maps between a student's and a teacher's vocabulary: build, refine, inspect.

Everything here is sparse and explained by bytes: a weight or a spelling exists because the bytes
of two tokens say so (apart from the similarity of embeddings, which `generate` adds).
"""
