"""Questions of the toy pair's own kind, one JSON object per line: python examples/questions.py FILE.jsonl [HOW_MANY]"""

import json
import sys
from pathlib import Path

from data_gen.prompts import ToyPrompts

path, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 160
path.parent.mkdir(parents=True, exist_ok=True)
prompts = ToyPrompts("instruct", "train", limit=count).load()
path.write_text("".join(json.dumps({"id": prompt.id, "prompt": prompt.content}) + "\n" for prompt in prompts))
