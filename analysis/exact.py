from toolkit.errors import merged

if __name__ == "__main__":
    merged("analysis.exact", "analysis.acceptance target_probs=[...] draft_probs=[[...],...] num_drafts=[2]")
