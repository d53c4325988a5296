"""Block drafts: DFlash and DSpark (arXiv:2607.05147), which give a block of tokens in one forward pass."""

from dataclasses import replace

from toolkit.drafts.kinds import DraftKind

DFLASH = DraftKind(
    "dflash",
    "DFlash",
    names="dflash",
    keys=("dflash_config",),
    load="toolkit.drafts.block.format:load",
    save="toolkit.drafts.block.format:save",
    session="toolkit.drafts.block.session:BlockReader",
    settings="toolkit.drafts.block.training:Blocks",
    training="toolkit.drafts.block.training:BlockRecipe",
    proposer="toolkit.decoding.proposers.block:BlockProposer",
    recorder="toolkit.drafts.block.recorder:BlockRecorder",
    causes="toolkit.drafts.block.causes:causes",
    reads_target=True,
    frozen=("embed_tokens", "lm_head"),
    forwards="block",
    engines={"vllm": "dflash"},
    cautions="toolkit.drafts.block.engines:cautions",
)
DSPARK = replace(
    DFLASH,
    name="dspark",
    label="DSpark",
    names="dspark",
    keys=("dspark_config",),
    settings="toolkit.drafts.block.training:MarkovBlocks",
    engines={"vllm": "dspark"},
)
