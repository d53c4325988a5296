"""EAGLE-3 drafts (arXiv:2503.01840): one layer that reads each token beside the target's state before it."""

from toolkit.drafts.kinds import DraftKind

EAGLE3 = DraftKind(
    "eagle3",
    "EAGLE-3",
    names=r"eagle-?3",
    keys=("draft_vocab_size", "eagle_config"),
    weights=frozenset({"fc.weight", "layers.0.hidden_norm.weight"}),
    load="toolkit.drafts.eagle3.format:load",
    save="toolkit.drafts.eagle3.format:save",
    session="toolkit.drafts.eagle3.session:StateReader",
    settings="toolkit.drafts.eagle3.training:Unrolled",
    training="toolkit.drafts.eagle3.training:Eagle3Recipe",
    recorder="toolkit.drafts.eagle3.recorder:Eagle3Recorder",
    causes="toolkit.drafts.eagle3.causes:causes",
    reads_target=True,
    engines={
        "vllm": "eagle3",
        "tensorrt_llm": "Eagle3",
        "sglang": "EAGLE3",
        "sglang_adaptive": "EAGLE3",
        "llama_cpp": "draft-eagle3",
    },
)
