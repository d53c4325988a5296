from toolkit.errors import merged

if __name__ == "__main__":
    merged("analysis.standing", "analysis.frontier dev=[SWEEP,...] table_costs=[.1,.2,.3]")
