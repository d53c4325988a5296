"""A stopping policy of one's own: checked, decoded with, and swept beside fixed lengths. The toy pair: half a minute.

python examples/policy.py
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from toolkit import ModelPair, generate
from toolkit.stopping.base import Thresholded
from toolkit.testing import check_policy

CONF = Path("outputs/examples/conf")
STOPPING = "_target_: examples.policy.TopTwo\nthreshold: 0.5\n"
METHOD = """defaults:
  - base/drafting@_here_
  - _self_
  - /stopping@policy: top_two
  - /rule@rule: rejection
name: top_two
"""


@dataclass(frozen=True)
class TopTwo(Thresholded):
    """Draft on while the two most probable tokens of the draft hold at least `threshold`."""

    threshold: float = 0.5

    @property
    def level(self):
        return self.threshold

    def score(self, step, state):
        return state, step.top_probs[..., :2].sum(-1)  # [B], of the step just drawn


def main():
    check_policy(TopTwo())  # one state per row, whatever its neighbours do; nothing read that a recording lacks
    for path, text in (("stopping/top_two.yaml", STOPPING), ("method/top_two.yaml", METHOD)):
        (CONF / path).parent.mkdir(parents=True, exist_ok=True)
        (CONF / path).write_text(text)
    prompts = ["Q: Join with dashes: door summer harbor.\nA:"]
    (generation,) = generate(ModelPair.toy(), prompts, "top_two", config_dir=str(CONF), max_new_tokens=24)
    counts = generation.counts
    print(f"{counts.num_generated} tokens in {counts.num_target_calls} forward passes of the target")
    grid = "+grid={speculative: {policy.num_drafted: [1,2,4]}, top_two: {policy.threshold: [.5,.7,.9]}}"
    words = ["--config-dir", str(CONF), "~grid", grid, "prompts.limit=24", "sampling.max_new_tokens=32"]
    subprocess.run([sys.executable, "-m", "analysis.sweep", *words], check=True)


if __name__ == "__main__":
    main()
