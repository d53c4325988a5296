from toolkit.errors import merged

if __name__ == "__main__":
    merged("analysis.agreement", "analysis.sweep source=live replayed=[SWEEP,...]")
