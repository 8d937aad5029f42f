"""qkv_eval: what a cache format does to a model, and what it saves.

It uses only the public names of qkv, and measures any transformers ``Cache``, not only ours.

- ``text``: the text to score, cut into windows
- ``perplexity``, ``divergence``: scores of a text through a cache, against the unquantized cache
- ``peers``: the caches of one run
- ``held``: the bytes that a cache really holds
- ``bench.decode``, ``bench.kernel``: time of a decode step, time of attention alone
- ``compare``: quality, memory and speed in one table
- ``commands``: the ``qkv compare`` and ``qkv bench`` commands
"""
