"""What the engine asks a model before it trusts it.

Chunk recurrence is exact only if attention is the one way in which tokens see each other, and only
if that attention is plain: causal or a sliding window, no bias, no cap. A model that is anything
else is refused here by name, before any work.
"""

from oomb.probes.comparison import compare_with_whole_run, refuse_other_channels
from oomb.probes.facts import AttentionLayer, ModelFacts
from oomb.probes.head import find_linear_head, is_watched
from oomb.probes.model import probe_model, router_settings

__all__ = [
    "AttentionLayer",
    "ModelFacts",
    "compare_with_whole_run",
    "find_linear_head",
    "is_watched",
    "probe_model",
    "refuse_other_channels",
    "router_settings",
]
