"""The parts of the toy pair's recipe: tokenizer, batches, training, evaluation and export. `data_gen.toy` runs them."""
