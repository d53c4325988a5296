"""Keys of classes that are not ours, and of functions that load models: merged into what `toolkit.config.classes` reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from toolkit.config.notes import Above, AtLeast, Like, Model, Neutral

Switch = Literal["auto", "off"] | bool
DEVICE = Like(r"(cpu|cuda|mps|xpu|hpu|npu|meta)(:\d{1,4})?", "a device like cpu, cuda or cuda:1")
Dtype = Literal["float32", "float16", "bfloat16", "float64", "auto"]

LOADING = {
    "device": Annotated[str, DEVICE, "cpu, cuda, cuda:1, ..."],
    "dtype": Annotated[Dtype, "of the weights; auto: as the checkpoint says"],
    "revision": Annotated[str | None, "commit, branch or tag of a checkpoint on the hub (the target's, in a pair)"],
    "attn_implementation": Annotated[str | None, "as in transformers: eager, sdpa, ..."],
    "trust_remote_code": Annotated[bool, "run code that comes with a checkpoint of the hub"],
}
PAIR = {
    **LOADING,
    "target": Annotated[str, Model(), "the large model: a folder, a hub name, or toy/target"],
    "draft": Annotated[
        str | list[str] | None,
        Model("draft_revision"),
        "the small model, as the large one; toy/draft; a list: several; null: none",
    ],
    "device_map": Annotated[str | dict[str, Any] | None, "of the target, as in transformers; needs accelerate"],
    "quantization": Annotated[Literal["8bit", "4bit"] | None, "of the target, through bitsandbytes; null: none"],
    "draft_revision": Annotated[str | None, "commit, branch or tag of the drafts"],
    "drafts": Annotated[Sequence[str], Model("draft_revision"), "several drafts, instead of the one"],
    "name": Annotated[str, "how tables call the pair"],
    "chat_template_options": Annotated[
        dict[str, Any] | None, "what the chat template is told beside the messages: {enable_thinking: false}"
    ],
    "cuda_graphs": Annotated[Switch, "capture forwards of recurring shapes as CUDA graphs and replay them"],
    "self_check": Annotated[Switch, "try each architecture on a tiny copy first; off: decode it on trust, with a warning"],
    "packed": Annotated[
        Switch, Neutral("auto"), "linear layers on a CPU: weights laid out for a few tokens, where that is faster"
    ],
    "writable": Annotated[
        bool, Neutral(False), "weights may be written between two calls: packed ones are compared with them in each"
    ],
}  # fmt: skip
PRESET = Literal["200m", "1b", "8b"] | None
OPTIMIZER = {
    "lr": Annotated[
        float, Above(0), "learning rate at its highest; null: found by a short trial around what the width says"
    ]
    | None,
    "weight_decay": Annotated[float, AtLeast(0), "pull of the weights towards 0, decoupled in AdamW"],
    "betas": Annotated[list[float], "how long the averages of gradients and of their squares remember"],
    "eps": Annotated[float, AtLeast(0), "keeps the step finite where gradients vanish"],
}

OTHERS: dict[str, dict[str, Any]] = {
    "toolkit.models.pair.ModelPair.from_pretrained": PAIR,
    "toolkit.testing.padding.padded_pair": {
        **{key: value for key, value in PAIR.items() if key not in ("device_map", "quantization")},
        "target_preset": Annotated[PRESET, "size that the target is padded to; null: as it is"],
        "draft_preset": Annotated[PRESET, "size that the draft is padded to (trained heads do not fit then); null: as it is"],
        "seed": Annotated[int, "of the weights that are added"],
    },
    "toolkit.models.pair.load_draft": {
        **LOADING,
        "source": Annotated[str | None, Model(), "the draft: a folder, a hub name, or toy/draft"],
        "target": Annotated[str, Model(), "its target, read where the draft's folder lacks the target's embeddings"] | None,
    },
    "torch.optim.Adam": OPTIMIZER,
    "torch.optim.AdamW": OPTIMIZER,
    "pytorch_lightning.Trainer": {
        "accelerator": Annotated[str, "cpu, gpu or auto"],
        "devices": Annotated[int | str | list[int], "how many, which, or auto"],
        "strategy": Annotated[str, "how several processes work together: auto or ddp"],
        "precision": Annotated[str | int, "of the numbers: 32-true, 16-mixed, bf16-mixed, ..."],
        "max_epochs": Annotated[int, AtLeast(1), "passes over the training data"] | None,
        "gradient_clip_val": Annotated[float, AtLeast(0), "largest norm of a step's gradient; null: any"] | None,
        "accumulate_grad_batches": Annotated[int, AtLeast(1), "batches per step"],
        "check_val_every_n_epoch": Annotated[int, AtLeast(1), "epochs between validations"] | None,
        "log_every_n_steps": Annotated[int, AtLeast(1), "steps between points of the training curve"] | None,
        "num_sanity_val_steps": Annotated[int, AtLeast(-1), "validation batches that are tried before training"] | None,
        "enable_model_summary": Annotated[bool, "print the layers"],
        "use_distributed_sampler": Annotated[bool, "false: the batches split themselves among processes"],
        "fast_dev_run": Annotated[bool | int, "a batch of training and one of validation, nothing kept"],
        "limit_train_batches": Annotated[int | float, AtLeast(0), "training batches of an epoch, or a share of them"] | None,
        "limit_val_batches": Annotated[int | float, AtLeast(0), "validation batches, or a share of them"] | None,
    },
}  # fmt: skip
