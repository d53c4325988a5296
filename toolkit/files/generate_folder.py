"""The file that makes a folder callable: `model.generate(custom_generate=FOLDER, trust_remote_code=True)` of transformers."""

from __future__ import annotations

from pathlib import Path

from toolkit.files.atomic import write_text

FILE = Path("custom_generate", "generate.py")
CODE = '''"""Called by `model.generate(custom_generate=FOLDER, trust_remote_code=True, draft=FOLDER)` of transformers."""

from toolkit.integrations.custom_generate import generate  # pip install acceptance-toolkit
'''


def write(folder: Path) -> Path:
    """Write the file into an exported head's or draft's folder."""
    return write_text(folder / FILE, CODE)


def function_line(arguments: str, more: str = "") -> str:
    """How transformers calls the function, for a card; arguments: how folders are named, as `draft="FOLDER"`."""
    return f"""```python
from toolkit.integrations.transformers import custom_generate
model.generate(**inputs, custom_generate=custom_generate, {arguments})
{more}```
"""


def lines(arguments: str) -> str:
    """Two ways to call it: the function, and the folder."""
    folder = (
        f'model.generate(**inputs, custom_generate="FOLDER", trust_remote_code=True, {arguments}, streamer=streamer)'
    )
    return function_line(arguments, f"{folder}\n")
