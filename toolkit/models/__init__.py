"""A pair of checkpoints: loading, tokenizer, chat templates, fingerprints, teacher-forced passes."""
