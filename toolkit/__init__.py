"""Acceptance prediction for speculative decoding.

The two names most users need are imported on first use. So `import toolkit` stays light, and the decoding engine needs
nothing beyond torch, transformers and safetensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.api import generate
    from toolkit.models.pair import ModelPair

__all__ = ["ModelPair", "__version__", "generate"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name == "ModelPair":
        from toolkit.models.pair import ModelPair

        return ModelPair
    if name == "generate":
        from toolkit.api import generate

        return generate
    raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
