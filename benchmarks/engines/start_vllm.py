"""vLLM 0.32.0's server with one kernel of its wheel for CPUs corrected. Runs in vLLM's environment, without this package.

    python benchmarks/engines/start_vllm.py --model TARGET ...        the words of vllm.entrypoints.openai.api_server

`_expand_kernel_impl` writes a number per request (temperature, top-k, top-p) to each of its drafted tokens. The wheel's own
writes them into a copy of integers, so logits are divided by what was in memory, and at T > 0 texts with drafts are noise.
At T = 0 it is not called. vLLM's processes import the main file again, and so have the kernel below, too.
"""

import runpy

from vllm.utils import cpu_triton_utils


def expand(output, values, ends, replace_from, replace_to, MAX_NUM_TOKENS=None):
    """values [B], `replace_from` become `replace_to`, into output [T]: the b-th to positions ends[b - 1] to ends[b]."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    output.copy_(values.where(values != replace_from, replace_to).repeat_interleave(counts))


cpu_triton_utils._expand_kernel_impl = expand

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
