"""qkv: a small, fast and honest key/value cache for Hugging Face models.

::

    import qkv
    qkv.enable(model)
    cache = qkv.QKVCache(model.config, "int8")
    model.generate(**inputs, past_key_values=cache)
"""

from qkv.cache import QKVCache
from qkv.config import CacheConfig
from qkv.formats import formats
from qkv.hf import disable, enable
from qkv.native import SlowPathWarning

__version__ = "0.1.0"

__all__ = ["CacheConfig", "QKVCache", "SlowPathWarning", "disable", "enable", "formats"]
