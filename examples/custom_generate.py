"""The toolkit's methods inside transformers' own `generate`: the same greedy texts, fewer forward passes of the target.

python examples/custom_generate.py                   the embedded toy pair: seconds
python examples/custom_generate.py TARGET DRAFT      yours
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.integrations.transformers import custom_generate
from toolkit.models.pair import resolve

target, draft = sys.argv[1:3] if len(sys.argv) > 2 else ("toy/target", "toy/draft")
model = AutoModelForCausalLM.from_pretrained(resolve(target), dtype="float32").eval()
tokenizer = AutoTokenizer.from_pretrained(resolve(target), padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
prompts = ["Q: Join with dashes: door summer harbor.\nA:", "Q: Repeat coral 5 times.\nA:", "Q: What is 3 + 4?\nA:"]
inputs = tokenizer(prompts, return_tensors="pt", padding=True)  # a batch of uneven prompts

options = {"max_new_tokens": 32, "do_sample": False, "return_dict_in_generate": True}
expected = model.generate(**inputs, **options, pad_token_id=tokenizer.pad_token_id).sequences
print(f"transformers: {expected.shape[1] - inputs['input_ids'].shape[1]} forward passes of the target")
for method, source in (("lookup_rate", {}), ("rate", {"draft": draft})):
    output = model.generate(**inputs, **options, custom_generate=custom_generate, method=method, **source)
    rounds = max(counts.num_target_calls for counts in output.counts)
    same = torch.equal(output.sequences, expected)
    print(f"{method}: {rounds} forward passes of the target, the same texts: {same}")
    if not same:
        sys.exit("expected the greedy texts of transformers")
