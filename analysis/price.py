# Became part of analysis.timing: what a draft forward may cost at every cost ratio.
from toolkit.errors import merged

if __name__ == "__main__":
    merged("analysis.price", "analysis.timing traces=FOLDER head=FOLDER")
