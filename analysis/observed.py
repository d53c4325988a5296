from toolkit.errors import merged

if __name__ == "__main__":
    merged("analysis.observed", "analysis.advise responses=FILE.jsonl cost_ratio=.1")
